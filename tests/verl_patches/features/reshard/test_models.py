"""The tables against the real models, and the exchange against upstream's own load_weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.ranks import run_ranks
from tests.verl_patches.features.reshard.reference import full_weights
from verl_patches.features.reshard.deepseek_v3 import DeepseekV3Shape
from verl_patches.features.tiny_model.architecture import tiny_config

WORLD = 4
VOCABULARY = 500
"""No multiple of 64, so that vLLM pads it."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Runs every check once on one set of ranks; a failed check fails here with the ranks' output."""
    folder: Path = tmp_path_factory.mktemp("models")
    config = tiny_config(0, 1, 2)
    config.vocab_size, config.n_routed_experts = VOCABULARY, 32
    config.torch_dtype = torch.bfloat16
    config.save_pretrained(folder)
    weights = full_weights(DeepseekV3Shape.from_config(config), torch.bfloat16)
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = weights[name].float()
    save_file(weights, folder / "model.safetensors")
    run_ranks("tests.verl_patches.features.reshard.model_program", WORLD, folder, timeout=300)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.slow
def test_tables_cover_every_weight_once(results: list[dict]) -> None:
    # Embedding, final norm, output layer and 11 to 15 weights a layer; pipeline stages hold two layers and one.
    assert {result["rollout tensors"] for result in results} == {44}
    assert [result["training tensors"] for result in results] == [25, 25, 16, 16]


@pytest.mark.slow
def test_the_exchange_equals_load_weights(results: list[dict]) -> None:
    assert all(result["exchange"]["rounds"] > 1 for result in results)


@pytest.mark.slow
def test_absorbed_weights_follow(results: list[dict]) -> None:
    assert all(result["absorbed"] == 3 for result in results)
