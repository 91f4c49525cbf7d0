"""DeepSeek-V3 as a megatron-core 0.8.0 configuration.

megatron-core 0.8.0 knows neither multi-head latent attention nor DeepSeek's routing, so the fields for both are
declared here and in `moe_config`. Field names follow later megatron-core releases (``MLATransformerConfig``) where
those have one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from post_training.models.megatron.moe_config import MoETransformerConfig, parallelism, types


@dataclass
class DeepseekV3TransformerConfig(MoETransformerConfig):
    """Configuration of a DeepSeek-V3 decoder; the fields of its attention."""

    q_lora_rank: int = 1536
    """Width of the compressed query."""

    kv_lora_rank: int = 512
    """Width of the compressed key and value, without the rotary part."""

    qk_head_dim: int = 128
    """Width per head of query and key without position (``qk_nope_head_dim``)."""

    qk_pos_emb_head_dim: int = 64
    """Width of the rotary part of query and key (``qk_rope_head_dim``)."""

    v_head_dim: int = 128
    """Width per head of the value."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies (``rope_theta``)."""

    rotary_scaling_factor: float = 1.0
    """YaRN context extension factor; 1 means plain rotary embedding."""

    original_max_position_embeddings: int = 4096
    """Context length before the extension, in tokens."""

    beta_fast: float = 32.0
    """Rotations within the original context above which a frequency is kept as it is."""

    beta_slow: float = 1.0
    """Rotations within the original context below which a frequency is divided by the factor."""

    mscale: float = 1.0
    """YaRN attention temperature coefficient of the rotary part."""

    mscale_all_dim: float = 0.0
    """YaRN attention temperature coefficient of all dimensions; 0 leaves the softmax scale alone."""


def deepseek_v3_config_from_huggingface(
    hf_config: Any, dtype: torch.dtype, **overrides: Any
) -> DeepseekV3TransformerConfig:
    """Translate a HuggingFace ``DeepseekV3Config`` for the parallel layout that ``parallel_state`` holds now.

    ``dtype`` is that of the parameters and of what pipeline stages exchange. ``overrides`` replace single fields
    (Hydra's ``override_transformer_config``). The family has rejected what the model cannot represent.
    """
    fields = {
        **_dimensions(hf_config),
        **_rotary(hf_config),
        **_routing(hf_config),
        **parallelism(),
        **types(dtype),
    }
    return DeepseekV3TransformerConfig(**{**fields, **overrides})


def _dimensions(hf_config: Any) -> dict[str, Any]:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "ffn_hidden_size": hf_config.intermediate_size,
        "kv_channels": hf_config.qk_nope_head_dim,
        "attention_dropout": hf_config.attention_dropout,
        "hidden_dropout": 0.0,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
    }


def _rotary(hf_config: Any) -> dict[str, Any]:
    scaling = hf_config.rope_scaling
    if not scaling:
        return {"rotary_base": hf_config.rope_theta}
    return {
        "rotary_base": hf_config.rope_theta,
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast", 32),
        "beta_slow": scaling.get("beta_slow", 1),
        "mscale": scaling.get("mscale", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
    }


def _routing(hf_config: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": hf_config.n_routed_experts,
        "first_k_dense_replace": hf_config.first_k_dense_replace,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size * (hf_config.n_shared_experts or 0),
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_num_groups": hf_config.n_group,
        "moe_router_group_topk": hf_config.topk_group,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_norm_topk_prob": hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }
