"""verl's configuration in the arguments of MindSpeed-LLM, which is configured by a command line.

Names and meanings are those of MindSpeed-LLM v2.0.0 for DeepSeek-V3 (`examples/mcore/deepseek3`). Learning rate,
batches and data belong to verl; values for them are here only where the parser insists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_patches.features.mindspeed.feature import MindspeedSettings

Arguments = dict[str, Any]
"""Option without dashes -> its value; True for one that takes none, False or None for one that is left out."""


def command_line(arguments: Arguments) -> list[str]:
    """The words that MindSpeed-LLM's parser reads."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
    return words


def translate(config: Mapping[str, Any], hf_config: Any, settings: Any) -> Arguments:
    """What MindSpeed-LLM needs to train a DeepSeek-V3.

    Args:
        config: verl's `actor_rollout_ref` node, which has passed the checks of the feature.
        hf_config: the model's HuggingFace configuration.
        settings: the overlay's.

    Raises:
        ValueError: the model is one that MindSpeed-LLM cannot represent.
    """
    if getattr(hf_config, "num_nextn_predict_layers", 0):
        raise ValueError("multi-token prediction layers are not trained: set num_nextn_predict_layers to 0")
    return {
        **_model(hf_config),
        **_rotary(hf_config),
        **_experts(hf_config),
        "fix_router": settings.router_balance.forced,
        # In float32 MindSpeed-LLM would free the router's input itself, of which it believes to have made a copy.
        "router_gating_in_fp32": settings.precision == "bfloat16",
        **_parallelism(config["actor"]["megatron"]),
        **_recomputation(config["model"]),
        **_optimizer(settings.mindspeed),
        **_operators(settings.mindspeed),
        **_required(config["rollout"]),
    }


def _model(hf_config: Any) -> Arguments:
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


def _rotary(hf_config: Any) -> Arguments:
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


def _experts(hf_config: Any) -> Arguments:
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
        # The bias stays what the checkpoint has: GRPO does not balance experts.
        "moe_router_bias_update_rate": 0.0,
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permutation_async_comm": True,
    }


def _parallelism(megatron: Mapping[str, Any]) -> Arguments:
    stages = (megatron.get("override_transformer_config") or {}).get("num_layer_list")
    tensor = megatron["tensor_model_parallel_size"]
    return {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "pipeline_model_parallel_size": megatron["pipeline_model_parallel_size"],
        # A list of one stage says nothing, and MindSpeed-LLM refuses it.
        "num_layer_list": ",".join(map(str, stages)) if stages and len(stages) > 1 else None,
        "expert_model_parallel_size": megatron["expert_model_parallel_size"],
        # Whole experts over TP x EP, as the reshard tables have them; with TP1 the two arrangements are one.
        "moe_tp_extend_ep": tensor > 1,
        "distributed_backend": "nccl",
    }


def _recomputation(model: Mapping[str, Any]) -> Arguments:
    """What verl sets in the model's own configuration too, from the same keys."""
    if not model.get("enable_gradient_checkpointing"):
        return {}
    asked = model["gradient_checkpointing_kwargs"]
    return {
        "recompute_granularity": asked["activations_checkpoint_granularity"],
        "recompute_method": asked["activations_checkpoint_method"],
        "recompute_num_layers": asked["activations_checkpoint_num_layers"],
    }


def _optimizer(settings: MindspeedSettings) -> Arguments:
    return {
        "use_distributed_optimizer": True,
        "swap_optimizer": settings.swap_optimizer,
        "swap_optimizer_times": settings.swap_optimizer_times if settings.swap_optimizer else None,
    }


def _operators(settings: MindspeedSettings) -> Arguments:
    fused = settings.fused_operators
    return {
        "use_flash_attn": True,
        "mla_fa_without_pad": True,
        "use_fused_rotary_pos_emb": fused,
        "use_fused_swiglu": fused,
        "use_fused_rmsnorm": fused,
        "use_fused_moe_token_permute_and_unpermute": fused,
        "gemm_gradient_accumulation_fusion": fused,
        "no_gradient_accumulation_fusion": not fused,
    }


def _required(rollout: Mapping[str, Any]) -> Arguments:
    """Sequences are packed end to end, so attention is told where they end and shapes differ between micro batches."""
    return {
        "reset_position_ids": True,
        "variable_seq_lengths": True,
        "bf16": True,
        "seq_length": rollout["prompt_length"] + rollout["response_length"],
        "micro_batch_size": 1,
        "train_iters": 1,
        "lr": 0.0,
    }
