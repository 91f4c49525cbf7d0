"""The names of keys: which are known, which one a user may have meant, and what keys of others are called here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import get_type_hints

from pydantic import BaseModel

from verl_patches.features.settings import NODE, SET_ELSEWHERE, OverlaySettings
from verl_patches.trainer.configuration_checks.schema import Configuration, group_of

_NOT_YET = "is not supported yet; take it away"
_FSDP = "belongs to FSDP, and Megatron is the only back-end that the overlay patches; take it away"

# Keys, or groups of them, that are known elsewhere (verl's recipes, FSDP, other trainers), and what to do instead.
ELSEWHERE = {
    "algorithm.clip_ratio_low": "is called actor_rollout_ref.actor.clip_ratio_low",
    "algorithm.clip_ratio_high": "is called actor_rollout_ref.actor.clip_ratio_high",
    "algorithm.clip_ratio_c": "is called actor_rollout_ref.actor.clip_ratio_c",
    "algorithm.use_token_level_loss": "is called actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.use_token_level_loss": "is called actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "algorithm.filter_groups": _NOT_YET,
    "data.filter_groups": _NOT_YET,
    "reward_model.overlong_buffer": _NOT_YET,
    "overlong_buffer": "would be reward_model.overlong_buffer, which " + _NOT_YET,
    "algorithm.overlong_buffer": "would be reward_model.overlong_buffer, which " + _NOT_YET,
    "actor_rollout_ref.actor.fsdp_config": _FSDP,
    "actor_rollout_ref.ref.fsdp_config": _FSDP,
    "actor_rollout_ref.model.lora_rank": _FSDP,
    "actor_rollout_ref.model.lora_alpha": _FSDP,
    "actor_rollout_ref.model.use_remove_padding": _FSDP,
    "actor_rollout_ref.model.ulysses_sequence_parallel_size": _FSDP,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _FSDP,
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": _FSDP,
    "ulysses_sequence_parallel_size": _FSDP,
}


def unknown_key(key: str) -> str:
    """One sentence for a key that nothing reads: what it is called here, or the nearest key that there is."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        group = ".".join(parts[:length])
        if group in ELSEWHERE:
            return f"unknown key {key}, which nothing reads: {group} {ELSEWHERE[group]}"
    meant = nearest(key, known_keys())
    advice = f"did you mean {meant}?" if meant else "take it away"
    return f"unknown key {key}, which nothing reads; {advice}"


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The key that `key` was probably meant to be: a sibling first, then one of the same name elsewhere, then any."""
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
    """Every key of the schema and of the overlay, groups included."""
    return schema_keys() | frozenset(_keys_of_settings(OverlaySettings, f"{NODE}.", SET_ELSEWHERE))


@cache
def schema_keys() -> frozenset[str]:
    """Every key of the schema, groups included; of the overlay only its group."""
    return frozenset(_keys_of(Configuration, ""))


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
