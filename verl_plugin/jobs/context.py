"""Rejects, before Ray starts, context parallelism with which training would end or compute something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.models.families import sizes_of
from post_training.plan.verl_0_9_jobs import ulysses_parts
from post_training.report.run_folder import at
from verl_plugin.libraries import LIBRARIES_KEY
from verl_plugin.mindspeed_layers import LAYERS, trains_with_mindspeed
from verl_plugin.sentences import invalid

_ACTOR = "actor_rollout_ref.actor"
_MEGATRON, _REF = f"{_ACTOR}.megatron", "actor_rollout_ref.ref.megatron"
KEY = f"{_MEGATRON}.context_parallel_size"
_DYNAMIC = f"{_MEGATRON}.dynamic_context_parallel"
# verl's workers give the engine the model's key.
_PACKED = "actor_rollout_ref.model.use_remove_padding"
_ULYSSES = "ulysses_sequence_parallel_size"
_SIZES = tuple(
    f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"
_ALGORITHM, _LATENT = f"{_TRANSFORMER}.context_parallel_algo", f"{_TRANSFORMER}.multi_latent_attention"
_RING = "megatron_cp_algo"
# MindSpeed's other algorithms, and why they do not fit verl's packed batches (core_r0.16.0). verl gives each rank two
# chunks of every sequence, one from either half.
_OTHERS = {
    # get_cu_seqlens_qkv_before_attn in te/pytorch/attention/dot_product_attention/kvallgather_context_parallel.py
    "kvallgather_cp_algo": "MindSpeed takes consecutive parts of a packed batch, and verl two chunks of a sequence",
    # ContextParallelFeature.register_patches in features_manager/context_parallel/context_parallel_feature.py
    "ulysses_cp_algo": "MindSpeed exchanges no heads in the layers that verl builds",
    "hybrid_cp_algo": "MindSpeed exchanges no heads in the layers that verl builds",
}


def parts_of_sequences(config: Mapping[str, Any], role: str = "actor") -> int:
    """Return the number of ranks that share a sequence of the actor or of `ref`.

    verl multiplies a rank's limit of tokens by it.
    """
    if at(config, f"{_ACTOR}.strategy") == "megatron":
        return int(at(config, KEY))
    return ulysses_parts(config["actor_rollout_ref"][role])


def ulysses_problems(config: Mapping[str, Any], dies: int) -> Iterator[str]:
    """Yield an error for each number of FSDP2's ranks, of `dies`, that cannot share sequences."""
    for role in ("actor", "ref"):
        key, parts = f"actor_rollout_ref.{role}.fsdp_config.{_ULYSSES}", parts_of_sequences(config, role)
        if parts > 1 and not at(config, _PACKED):
            yield invalid(key, parts, f"only packed batches can be shared, and {_PACKED}=False", "1")
        if dies % parts:
            yield invalid(key, parts, f"{dies} dies are not a multiple", f"a divisor of {dies}")


def context_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each key with which Megatron-core's context parallelism does not compute.

    Args:
        config: resolved configuration of the whole job, trained with Megatron-core.
    """
    if at(config, _DYNAMIC):
        yield invalid(_DYNAMIC, True, "Megatron-core 0.16 has no groups for it", f"false, and {KEY} to a number")
    for name in _SIZES:
        own, reference = at(config, f"{_MEGATRON}.{name}"), at(config, f"{_REF}.{name}")
        if reference != own:
            reason = f"actor and reference share their process groups, and {_MEGATRON}.{name}={own}"
            yield invalid(f"{_REF}.{name}", reference, reason, str(own))
    size = at(config, KEY)
    if size == 1:
        return
    if not trains_with_mindspeed(config):
        reason = f"only MindSpeed's layers share sequences ({LIBRARIES_KEY}=[{LAYERS},...])"
        yield invalid(KEY, size, reason, "1 with other layers")
    if not at(config, _PACKED):
        yield invalid(_PACKED, False, f"with {KEY}={size} batches have to be packed", "true")
    algorithm = at(config, _ALGORITHM) or _RING
    if algorithm != _RING:
        reason = _OTHERS.get(algorithm, "it has not been run with verl's packed batches")
        yield invalid(_ALGORITHM, algorithm, reason, _RING)


def context_model_problems(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield why ranks cannot share the sequences of `model`, the values of its config.json."""
    if at(config, f"{_ACTOR}.strategy") != "megatron" or at(config, KEY) == 1:
        return
    if sizes_of(model).mla and not at(config, _LATENT):
        reason = f"with {KEY}={at(config, KEY)} MindSpeed's attention does not take latent attention's widths otherwise"
        yield invalid(_LATENT, at(config, _LATENT), reason, "true")
