"""Rejects values of another type than the job's own files have, before other checks read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.heartbeats.settings import KEY as HANG_DETECTION
from verl_plugin.libraries import LIBRARIES_KEY
from verl_plugin.sentences import invalid
from verl_plugin.step_record.checks import MOST, STEPS

_ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_WHOLE = "trainer.save_freq"
# Keys that the files do not have: those of this project, and vLLM's that checks compare.
_GROUPS = (HANG_DETECTION, f"{_VLLM}.additional_config")
_NUMBERS = (MOST, f"{_VLLM}.prefill_context_parallel_size", f"{_VLLM}.decode_context_parallel_size")
_LISTS = (STEPS, LIBRARIES_KEY)


def type_problems(config: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each value of a wrong type.

    A group has to stay a group, a number a number or null, and a switch must not become text or a group.

    Args:
        config: resolved configuration of the job.
        own: the same without overrides.
    """
    yield from _changed_types(config, own, "")
    for key in _GROUPS:
        if not isinstance(at(config, key) or {}, Mapping):
            yield invalid(key, at(config, key), "not a group of keys", "{}")
    for key in _NUMBERS:
        if not _is_number(at(config, key) or 0):
            yield invalid(key, at(config, key), "not a number", "a whole number")
    for key in _LISTS:
        names = at(config, key)
        if not isinstance(names, list | None) and not (key == LIBRARIES_KEY and isinstance(names, str)):
            yield invalid(key, names, "not a list", "a list such as [...]")
    if not isinstance(at(config, _WHOLE), int):
        yield invalid(_WHOLE, at(config, _WHOLE), "not a number of steps", "-1 to save nothing, or a whole number")


def _changed_types(config: Mapping[str, Any], own: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, expected in own.items():
        key, value = f"{prefix}{name}", config.get(name)
        if isinstance(expected, Mapping):
            if isinstance(value, Mapping):
                yield from _changed_types(value, expected, f"{key}.")
            elif expected or value is not None:
                yield invalid(key, value, "not a group of keys", "its keys, one by one")
        elif isinstance(expected, bool):
            if isinstance(value, str | Mapping | list):
                yield invalid(key, value, "not a switch", "true or false")
        elif isinstance(expected, int | float) and value is not None and not _is_number(value):
            yield invalid(key, value, "not a number", f"a number such as {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
