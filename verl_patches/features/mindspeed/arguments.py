"""Translates verl's configuration into the arguments of MindSpeed-LLM, which is configured by a command line.

Names and meanings are those of MindSpeed-LLM v2.0.0; the model's family provides those that describe the model.
Learning rate, batches and data belong to verl; the values given here are those that the parser requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from post_training.models.families import family_of
from verl_patches.features.mindspeed.feature import MindspeedSettings

Arguments = dict[str, Any]
"""Values by option name without dashes; True for an option that takes none, False or None for one that is omitted."""


def command_line(arguments: Arguments) -> list[str]:
    """Return the words for MindSpeed-LLM's parser."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(each) for each in (value if isinstance(value, list | tuple) else [value])]
    return words


def translate(config: Mapping[str, Any], hf_config: Any, settings: Any) -> Arguments:
    """Return the arguments with which MindSpeed-LLM trains a model.

    Args:
        config: verl's `actor_rollout_ref` node, which has passed the checks of the feature.
        hf_config: the model's HuggingFace configuration.
        settings: the overlay's.

    Raises:
        ValueError: the model is one that MindSpeed-LLM cannot represent.
    """
    model = family_of(hf_config).mindspeed
    assert model is not None, "the feature's checks reject other models"
    return {
        **model.arguments(hf_config),
        "fix_router": settings.router_balance.forced,
        # In float32 the cast makes no copy, and MindSpeed-LLM would free the router's input itself as if it were one.
        "router_gating_in_fp32": settings.precision == "bfloat16",
        **_parallelism(config["actor"]["megatron"]),
        **_recomputation(config["model"]),
        **_optimizer(settings.mindspeed),
        **_operators(settings.mindspeed),
        **_required(config["rollout"]),
    }


def _parallelism(megatron: Mapping[str, Any]) -> Arguments:
    stages = (megatron.get("override_transformer_config") or {}).get("num_layer_list")
    tensor = megatron["tensor_model_parallel_size"]
    return {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "pipeline_model_parallel_size": megatron["pipeline_model_parallel_size"],
        # A list of one stage is redundant, and MindSpeed-LLM rejects it.
        "num_layer_list": ",".join(map(str, stages)) if stages and len(stages) > 1 else None,
        "expert_model_parallel_size": megatron["expert_model_parallel_size"],
        # Whole experts over TP x EP, as in reshard's sharding specs; with TP1 the two arrangements are the same.
        "moe_tp_extend_ep": tensor > 1,
        "distributed_backend": "nccl",
    }


def _recomputation(model: Mapping[str, Any]) -> Arguments:
    """Return the recomputation options, which verl also sets in the model's own configuration from the same keys."""
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
    """Return options that every run needs. Sequences are packed: attention must know their bounds, and shapes vary."""
    return {
        "reset_position_ids": True,
        "variable_seq_lengths": True,
        "bf16": True,
        "seq_length": rollout["prompt_length"] + rollout["response_length"],
        "micro_batch_size": 1,
        "train_iters": 1,
        "lr": 0.0,
    }
