"""DeepSeek-V3 in the options of MindSpeed-LLM v2.0.0 (`examples/mcore/deepseek3`)."""

from __future__ import annotations

from typing import Any


def model_arguments(hf_config: Any) -> dict[str, Any]:
    """Return the options that describe a model that has passed `variant_findings`; True means one without a value.

    Raises ValueError for a rope_scaling that MindSpeed-LLM cannot represent.
    """
    return {**_model(hf_config), **_rotary(hf_config), **_experts(hf_config)}


def _model(hf_config: Any) -> dict[str, Any]:
    return {
        "spec": ["mindspeed_llm.tasks.models.spec.deepseek_spec", "layer_spec"],
        "use_mcore_models": True,
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "max_position_embeddings": hf_config.max_position_embeddings,
        "vocab_size": hf_config.vocab_size,
        "padded_vocab_size": hf_config.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "untie_embeddings_and_output_weights": True,
        "disable_bias_linear": True,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": hf_config.rms_norm_eps,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "attention_softmax_in_fp32": True,
        "no_masked_softmax_fusion": True,
        "multi_head_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_nope_head_dim": hf_config.qk_nope_head_dim,
        "qk_rope_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
    }


def _rotary(hf_config: Any) -> dict[str, Any]:
    plain = {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": int(hf_config.rope_theta),
    }
    scaling = hf_config.rope_scaling
    if not scaling:
        return plain
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling of type {kind!r} is not supported: DeepSeek-V3 uses yarn")
    return plain | {
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": scaling["factor"],
        "rope_scaling_original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "rope_scaling_beta_fast": int(scaling.get("beta_fast", 32)),
        "rope_scaling_beta_slow": int(scaling.get("beta_slow", 1)),
        "rope_scaling_mscale": scaling.get("mscale", 1.0),
        "rope_scaling_mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
    }


def _experts(hf_config: Any) -> dict[str, Any]:
    return {
        "num_experts": hf_config.n_routed_experts,
        "first_k_dense_replace": hf_config.first_k_dense_replace,
        "moe_layer_freq": 1,
        "n_shared_experts": hf_config.n_shared_experts,
        "moe_intermediate_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "n_group": hf_config.n_group,
        "topk_group": hf_config.topk_group,
        "routed_scaling_factor": hf_config.routed_scaling_factor,
        "norm_topk_prob": hf_config.norm_topk_prob,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "noaux_tc",
        "moe_router_enable_expert_bias": True,
        # The bias stays that of the checkpoint: GRPO does not balance experts.
        "moe_router_bias_update_rate": 0.0,
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permutation_async_comm": True,
    }
