"""Rejects settings with which training cannot use the rollout's experts, before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.routing_replay.families import FSDP2_FAMILIES
from verl_plugin.sentences import invalid

MODES = ("disabled", "R2", "R3")
ENGINES = "verl_plugin.routing_replay.engines"
_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_SENDS = f"{_ROLLOUT}.enable_rollout_routing_replay"
_GROUPS = {"megatron": "megatron", "fsdp2": "fsdp_config"}
# Settings that split or repeat a forward in ways that routing replay does not support.
_SPLITS = {
    "megatron": (
        ("dynamic_context_parallel", False, "experts are not placed in parts of sequences"),
        ("virtual_pipeline_model_parallel_size", None, "replay has not been run with interleaved stages"),
    ),
    "fsdp2": (("ulysses_sequence_parallel_size", 1, "experts are not placed in parts of sequences"),),
}


def replay_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each invalid routing replay key, whatever the model is.

    Args:
        config: resolved configuration of the whole job.
    """
    strategy, sends = at(config, f"{_ACTOR}.strategy"), bool(at(config, _SENDS))
    mode_key = f"{_ACTOR}.{_GROUPS[strategy]}.router_replay.mode"
    mode = at(config, mode_key) or "disabled"
    if mode not in MODES:
        yield invalid(mode_key, mode, "no such mode", " or ".join(MODES))
    if mode == "R2" and strategy == "fsdp2":
        yield invalid(mode_key, mode, "verl records experts only on Megatron", "R3 or disabled")
    if mode == "R3" and not sends:
        yield invalid(_SENDS, False, f"{mode_key}=R3 needs the rollout's experts", "true")
    if mode == "R2" and sends:
        yield invalid(_SENDS, True, f"{mode_key}=R2 records experts in training", "false")
    if not sends:
        return
    if ENGINES not in (libraries := libraries_of(config)):
        reason = "without this project's engines nothing replays in padded batches, in the reference or on FSDP2"
        yield invalid(LIBRARIES_KEY, libraries, reason, f"[..., {ENGINES}]")
    yield from _reference_problems(config, strategy, mode)
    yield from _split_problems(config, strategy)
    yield from _rollout_problems(config)


def replay_model_problems(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield why routing replay does not work with `model`, the values of its config.json."""
    if not at(config, _SENDS):
        return
    if not (model.get("num_experts") or model.get("n_routed_experts")):
        yield invalid(_SENDS, True, f"{model.get('model_type')} has no experts", "false")
    elif at(config, f"{_ACTOR}.strategy") == "fsdp2" and model.get("model_type") not in FSDP2_FAMILIES:
        families = " and ".join(FSDP2_FAMILIES)
        yield invalid(f"{_ACTOR}.strategy", "fsdp2", f"there it replays only the routers of {families}", "megatron")


def _reference_problems(config: Mapping[str, Any], strategy: str, mode: str) -> Iterator[str]:
    """Require the actor's mode in the reference: their log-probs are subtracted, so both must use the same experts."""
    if not (at(config, f"{_ACTOR}.use_kl_loss") or at(config, "algorithm.use_kl_in_reward")):
        return
    key = f"{_REF}.{_GROUPS[strategy]}.router_replay.mode"
    if (at(config, key) or "disabled") != mode:
        yield invalid(key, at(config, key) or "disabled", f"the actor has {mode}, and both are compared", mode)


def _split_problems(config: Mapping[str, Any], strategy: str) -> Iterator[str]:
    for part, (name, only, reason) in product((_ACTOR, _REF), _SPLITS[strategy]):
        # verl 0.9.1 still takes some of the group's keys from the part itself.
        for key in (f"{part}.{_GROUPS[strategy]}.{name}", f"{part}.{name}"):
            value = at(config, key)
            if value is not None and value != only and (value is True or value != 1):
                yield invalid(key, value, reason, "null" if only is None else str(only).lower())


def _rollout_problems(config: Mapping[str, Any]) -> Iterator[str]:
    vllm = at(config, f"{_ROLLOUT}.engine_kwargs.vllm") or {}
    unquantised = "vLLM-Ascend 0.23 records experts only for weights that are not quantised"
    for key, value in ((f"{_ROLLOUT}.quantization", at(config, f"{_ROLLOUT}.quantization")),
                       (f"{_ROLLOUT}.engine_kwargs.vllm.quantization", vllm.get("quantization"))):  # fmt: skip
        if value:
            yield invalid(key, value, unquantised, "null")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (vllm.get(name) or 1) > 1:
            key = f"{_ROLLOUT}.engine_kwargs.vllm.{name}"
            yield invalid(key, vllm[name], "vLLM returns no experts with it", "1")
    if at(config, f"{_ROLLOUT}.name") != "vllm":
        yield invalid(f"{_ROLLOUT}.name", at(config, f"{_ROLLOUT}.name"), "experts come from vLLM-Ascend", "vllm")
