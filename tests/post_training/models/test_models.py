"""Check the weight tables against the real models, and the exchange against upstream's own load_weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from post_training.layouts.grouped_query import GroupedQueryShape
from post_training.models.deepseek_v3 import DeepseekV3Shape
from rehearsal.tiny_model.architecture import tiny_config
from tests.forked import MEGATRON
from tests.post_training.layouts import grouped_query_reference
from tests.post_training.layouts.reference import full_weights
from tests.post_training.models.small_models import write_models
from tests.ranks import run_ranks

WORLD = 4
VOCABULARY = 500
"""Not a multiple of 64, so vLLM pads it."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Results of all checks, run once on one set of ranks; a failed check raises here with the ranks' output."""
    folder: Path = tmp_path_factory.mktemp("models")
    config = tiny_config(0, 1, 2)
    config.vocab_size, config.n_routed_experts = VOCABULARY, 32
    config.torch_dtype = torch.bfloat16
    config.save_pretrained(folder)
    weights = full_weights(DeepseekV3Shape.from_config(config), torch.bfloat16)
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = 5 + weights[name].float() / 5
    save_file(weights, folder / "model.safetensors")
    run_ranks("tests.post_training.models.model_program", WORLD, folder, imported=MEGATRON)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.slow
def test_tables_cover_every_weight_once(results: list[dict]) -> None:
    # Embedding, final norm, output layer and 11 to 15 weights per layer; the pipeline stages hold two layers and one.
    assert {result["rollout tensors"] for result in results} == {44}
    assert [result["training tensors"] for result in results] == [25, 25, 16, 16]


@pytest.mark.slow
def test_the_exchange_equals_load_weights(results: list[dict]) -> None:
    assert all(result["exchange"]["buckets"] > 1 for result in results)


@pytest.mark.slow
def test_absorbed_weights_follow(results: list[dict]) -> None:
    assert all(result["absorbed"] == 3 for result in results)


@pytest.mark.slow
def test_qwen2_moves_between_the_real_models(tmp_path: Path) -> None:
    """Through the table and through verl's own path, the result equals upstream's load_weights bit for bit."""
    write_models(tmp_path)
    for name in ("qwen untied", "qwen tied"):
        shape = GroupedQueryShape.from_config(json.loads((tmp_path / name / "config.json").read_text()), bias=True)
        weights = grouped_query_reference.full_weights(shape, torch.bfloat16)
        save_file(weights, tmp_path / name / "model.safetensors")
    run_ranks("tests.post_training.models.dense_model_program", WORLD, tmp_path, imported=MEGATRON)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    # A stage has two of the four layers, with 7 weights each in training and in the rollout. With tied embeddings the
    # last stage has a copy.
    assert [result["qwen untied"]["training"] for result in found] == [15, 15, 16, 16]
    assert [result["qwen tied"]["training"] for result in found] == [15, 15, 16, 16]
    assert {result["qwen untied"]["rollout"] for result in found} == {31}
    assert {result["qwen tied"]["rollout"] for result in found} == {30}
    assert all(result[name]["buckets"] > 1 for result in found for name in result)
