"""Tiny random checkpoints of the models that vLLM-Ascend 0.23 is tested with, in transformers 5's configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm_cases import VOCABULARY, write_random_model

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def qwen25() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_SIZES, num_key_value_heads=2)


def qwen3() -> Any:
    """Return a Qwen3 whose heads are wider than their share of the hidden size, as in published models."""
    from transformers import Qwen3Config

    return Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=128)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_SIZES, num_key_value_heads=2, head_dim=128, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32,
        norm_topk_prob=True, decoder_sparse_step=1,
    )  # fmt: skip


def deepseek() -> Any:
    """Return a DeepSeek-V3 with the MLA widths that the fused kernels accept, and experts in groups."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_SIZES, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=1,
        moe_intermediate_size=32, first_k_dense_replace=1, routed_scaling_factor=2.5, scoring_func="sigmoid",
        topk_method="noaux_tc", norm_topk_prob=True,
    )  # fmt: skip


MODELS = {"qwen2.5": qwen25, "qwen3": qwen3, "qwen3moe": qwen3_moe, "deepseek": deepseek}
MIXTURES = ("qwen3moe", "deepseek")


def write_checkpoint(name: str, folder: Path) -> None:
    write_random_model(MODELS[name](), folder)
