"""The names of keys: which are known, which one a user may have meant, and what foreign keys are called here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import get_type_hints

from pydantic import BaseModel

from verl_patches.features.settings import NODE, SET_ELSEWHERE, OverlaySettings
from verl_patches.trainer.configuration_checks.backends import NAMES, SCHEMAS
from verl_patches.trainer.configuration_checks.schema import Configuration, group_of
from verl_patches.trainer.configuration_checks.schema.values import PAGE, SEE

_MODE = "actor_rollout_ref.actor.loss_agg_mode"
_MEGATRON = "actor_rollout_ref.actor.megatron"
_RECOMPUTED = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint"

# Keys, or groups of them, from verl's recipes and from guides to verl, and their names here.
RENAMED = {
    "algorithm.clip_ratio_low": "actor_rollout_ref.actor.clip_ratio_low",
    "algorithm.clip_ratio_high": "actor_rollout_ref.actor.clip_ratio_high",
    "algorithm.clip_ratio_c": "actor_rollout_ref.actor.clip_ratio_c",
    "algorithm.use_token_level_loss": _MODE,
    "actor_rollout_ref.actor.use_token_level_loss": _MODE,
    "overlong_buffer": "reward_model.overlong_buffer",
    "algorithm.overlong_buffer": "reward_model.overlong_buffer",
    "data.filter_groups": "algorithm.filter_groups",
    "actor_rollout_ref.model.ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.use_remove_padding": "actor_rollout_ref.model.use_remove_padding",
    "global_profiler.steps": "actor_rollout_ref.overlay.profile.steps",
    "hardware.gpus_per_node": "trainer.n_gpus_per_node",
    "hardware.total_nodes": "trainer.nnodes",
    "parallelism.tensor_parallelism": f"{_MEGATRON}.tensor_model_parallel_size",
    "parallelism.pipeline_parallelism": f"{_MEGATRON}.pipeline_model_parallel_size",
    "memory_config.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "memory_config.activation_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "memory_config.cpu_offload.optimizer": "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "memory_config.cpu_offload.parameters": "actor_rollout_ref.actor.fsdp_config.param_offload",
    "memory_config.recomputation.strategy": f"{_RECOMPUTED}_granularity",
    "memory_config.recomputation.checkpoint_layer": f"{_RECOMPUTED}_num_layers",
    "performance.torch_compile": "actor_rollout_ref.actor.use_torch_compile",
}
# Values of such keys that have another name here, by the key's name here.
_VALUES = {_MODE: {"true": "token-mean", "false": "seq-mean-token-mean"}}

# Keys, or groups of them, that are known elsewhere (verl's recipes, other trainers), and what to do instead.
ELSEWHERE = {
    "parallelism.data_parallelism": "follows from the dies and the other sizes; remove it",
    "global_profiler": "belongs to a later verl; remove it and set actor_rollout_ref.overlay.profile",
    "actor_rollout_ref.rollout.agent": f"belongs to a later verl, whose agents need an asynchronous rollout; {SEE}",
    "actor_rollout_ref.rollout.quantization": f"belongs to a later verl; {SEE}",
    "deployment": f"serves a model, but this is a training; remove it ({PAGE} explains serving)",
    "hardware.gpu_memory": "is an argument of plan.py, --die-memory; remove it",
    "iam": f"belongs to the cluster, not to a training; remove it ({PAGE} explains permissions)",
    "performance.compile_mode": "follows actor_rollout_ref.actor.use_torch_compile; remove it",
    "performance.enable_cudnn_benchmark": "is for CUDA; remove it",
    "performance.enable_flash_attention": "is always on: CANN's fused attention; remove it",
    "performance.enable_mixed_precision": "is always on: actor_rollout_ref.overlay.precision sets the type; remove it",
    "retry_options": "belongs in the policy file of scripts/supervise.py; remove it",
    "monitoring_config.alerting.threshold": "has reward_score, kl_divergence and entropy; for another metric write a "
    "rule in actor_rollout_ref.overlay.alerts.rules",
}


def unknown_key(key: str, value: str | None = None) -> str:
    """Describe a key that nothing reads in one sentence: its name and value here, or the nearest key that exists.

    Args:
        key: the whole name of the key.
        value: its value as a user would write it, if it is known.
    """
    for group in _groups(key):
        if group in RENAMED:
            name = RENAMED[group] + key.removeprefix(group)
            return f"unknown key {key}, which nothing reads: {group} is called {RENAMED[group]}{_then(name, value)}"
        if group in ELSEWHERE:
            return f"unknown key {key}, which nothing reads: {group} {ELSEWHERE[group]}"
    if named := only_back_end(key):
        return (
            f"unknown key {key}, which nothing reads: it belongs to {named}, but this configuration trains with the "
            f"other back-end; remove it{f' ({PAGE})' if 'lora' in key else ''}"
        )
    meant = nearest(key, known_keys())
    advice = f"did you mean {meant}?" if meant else "remove it"
    return f"unknown key {key}, which nothing reads; {advice}"


def _then(name: str, value: str | None) -> str:
    """Say how to use a key under its right name."""
    for group in _groups(name):
        if group in ELSEWHERE:
            return f", which {ELSEWHERE[group]}"
    if only_back_end(name) == NAMES["fsdp"]:
        return ", which belongs to FSDP"
    return "" if value is None else f"; write {name}={_VALUES.get(name, {}).get(value, value)}"


def _groups(key: str) -> Iterator[str]:
    """Yield the key and every group that it lies in, the smallest first."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def only_back_end(key: str) -> str | None:
    """Return the name of the only back-end that has a key; None if neither has it, or both."""
    having = [NAMES[backend] for backend, schema in SCHEMAS.items() if key in schema_keys(schema)]
    return having[0] if len(having) == 1 else None


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the key that `key` was probably meant to be: a sibling, else a namesake in another group, else any."""
    known = sorted(known)
    parent, _, name = key.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    namesakes = [each for each in known if each.rpartition(".")[2] == name]
    others = [each for each in known if not key.startswith(f"{each}.")]
    found = difflib.get_close_matches(key, namesakes, n=1, cutoff=0) or difflib.get_close_matches(key, others, n=1)
    return found[0] if found else None


@cache
def known_keys() -> frozenset[str]:
    """Return every key of the schemas and of the overlay, groups included."""
    return frozenset().union(*map(schema_keys, SCHEMAS.values())) | frozenset(
        _keys_of_settings(OverlaySettings, f"{NODE}.", SET_ELSEWHERE)
    )


@cache
def schema_keys(schema: type[BaseModel] = Configuration) -> frozenset[str]:
    """Return every key of a schema, groups included; the overlay's keys appear as their group only."""
    return frozenset(_keys_of(schema, ""))


def _keys_of(group: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in group.model_fields.items():
        key = prefix + (field.alias or name)
        yield key
        below = group_of(field)
        if below is not None:
            yield from _keys_of(below, f"{key}.")


def _keys_of_settings(group: type, prefix: str, left_out: Iterable[str] = ()) -> Iterator[str]:
    kinds = get_type_hints(group)
    for field in fields(group):
        if field.name in left_out:
            continue
        yield prefix + field.name
        if is_dataclass(kinds[field.name]):
            yield from _keys_of_settings(kinds[field.name], f"{prefix}{field.name}.")
