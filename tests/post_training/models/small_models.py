"""Small configurations: one for each family, and one for each variant that has its own layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from rehearsal.tiny_model.architecture import tiny_config

# A vocabulary of 500 is not a multiple of 64, so vLLM pads it.
SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "torch_dtype": torch.bfloat16,
}  # fmt: skip
SMALL_MODELS: dict[str, Callable[[], PretrainedConfig]] = {}


def small_model(name: str) -> Callable[[Callable[[], PretrainedConfig]], Callable[[], PretrainedConfig]]:
    """Register the decorated function as the maker of the configuration `name`."""
    return lambda make: SMALL_MODELS.setdefault(name, make)


def write_models(folder: Path) -> None:
    """Write one folder with a config.json for each small model."""
    for name, make in SMALL_MODELS.items():
        make().save_pretrained(folder / name)


def _deepseek(dense_layers: int) -> PretrainedConfig:
    config = tiny_config(0, 1, 2)
    config.vocab_size, config.n_routed_experts, config.hidden_size = 500, 32, 64
    config.num_attention_heads = config.num_key_value_heads = 8
    config.q_lora_rank, config.kv_lora_rank = 32, 32
    config.num_hidden_layers, config.first_k_dense_replace = 4, dense_layers
    config.torch_dtype = torch.bfloat16
    return config


@small_model("deepseek one dense")
def deepseek_with_one_dense_layer() -> PretrainedConfig:
    return _deepseek(1)


@small_model("deepseek two dense")
def deepseek_with_two_dense_layers() -> PretrainedConfig:
    return _deepseek(2)


@small_model("qwen tied")
def qwen2_whose_output_is_its_embedding() -> PretrainedConfig:
    return transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], **SIZES | {"tie_word_embeddings": True})


@small_model("qwen untied")
def qwen2() -> PretrainedConfig:
    return transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], **SIZES)


@small_model("qwen3")
def qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], head_dim=32, **SIZES)


@small_model("qwen3 moe")
def qwen3_moe() -> PretrainedConfig:
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    return transformers.Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], head_dim=32, **experts, **SIZES)
