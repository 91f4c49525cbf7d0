"""Reshards over generated pairs of layouts equal upstream's own `load_weights`, byte for byte, on emulated dies.

An ordinary run takes a part that has every axis. All pairs: `pytest --exhaustive` on this file.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rehearsal.tiny_model.architecture import tiny_config
from tests.ranks import run_ranks

AXES = {
    "pipeline stages",
    "stages of different lengths",
    "virtual stages",
    "TP grows",
    "TP shrinks",
    "several instances",
    "experts over TP x EP",
    "experts over EP, cut over TP",
    "EP in training above rollout",
    "EP in training below rollout",
    "one dense layer first",
    "two dense layers first",
    "shared expert replicated",
    "shared expert cut",
    "Qwen2.5 tied",
    "Qwen2.5 untied",
    "Qwen3",
    "Qwen3-MoE",
}
MODELS = ("deepseek one dense", "deepseek two dense", "qwen tied", "qwen untied", "qwen3", "qwen3 moe")


def write_models(folder: Path) -> None:
    """Small models with every structural part; 500 words are no multiple of 64, so that vLLM pads them."""
    for name, dense in (("deepseek one dense", 1), ("deepseek two dense", 2)):
        config = tiny_config(0, 1, 2)
        config.vocab_size, config.n_routed_experts, config.hidden_size = 500, 32, 64
        config.num_attention_heads = config.num_key_value_heads = 8
        config.q_lora_rank, config.kv_lora_rank = 32, 32
        config.num_hidden_layers, config.first_k_dense_replace = 4, dense
        config.torch_dtype = torch.bfloat16
        config.save_pretrained(folder / name)
    for name, tied in (("qwen tied", True), ("qwen untied", False)):
        Qwen2Config(
            architectures=["Qwen2ForCausalLM"],
            vocab_size=500,
            hidden_size=128,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            torch_dtype=torch.bfloat16,
        ).save_pretrained(folder / name)
    sizes = dict(
        vocab_size=500, hidden_size=128, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        torch_dtype=torch.bfloat16,
    )  # fmt: skip
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes).save_pretrained(folder / "qwen3")
    experts = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32)
    Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **experts, **sizes).save_pretrained(folder / "qwen3 moe")


def hold_against_upstream(folder: Path, world: int, train_layouts: int, every: int) -> Counter:
    """How many pairs had each property; fails with the ranks' output when one byte differs."""
    write_models(folder)
    request = {"models": MODELS, "train_layouts": train_layouts, "every": every}
    (folder / "request.json").write_text(json.dumps(request))
    run_ranks("tests.verl_patches.features.reshard.load_weights_program", world, folder, timeout=1500)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    assert all(result == results[0] for result in results)
    assert results[0]["wrong bytes found"]
    return Counter(results[0]["covered"])


@pytest.mark.slow
def test_generated_pairs_equal_load_weights(tmp_path: Path) -> None:
    covered = hold_against_upstream(tmp_path, world=4, train_layouts=3, every=3)
    assert covered["pairs"] >= 20
    assert AXES <= covered.keys(), AXES - covered.keys()


@pytest.mark.exhaustive
@pytest.mark.timeout(1600)
def test_two_hundred_generated_pairs_equal_load_weights(tmp_path: Path) -> None:
    covered = Counter()
    for world in (2, 4, 8):
        (tmp_path / str(world)).mkdir()
        covered += hold_against_upstream(tmp_path / str(world), world, train_layouts=3, every=1)
    print(json.dumps(covered, indent=1))
    assert covered["pairs"] >= 200
    assert AXES | {"key heads shared by ranks"} <= covered.keys()
