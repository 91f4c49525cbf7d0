"""The action for each cause of failure, from a file with ``retry_options``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from post_training.recovery.signs import CAUSES, Cause
from post_training.user_files import FileError, read_yaml

Action = Literal["retry", "retry_with_backoff", "reduce_batch_size", "stop"]
ACTIONS: tuple[Action, ...] = get_args(Action)

# Failures that the next start would meet again, or would hide.
NEVER_RETRIED: tuple[Cause, ...] = (
    "bad_configuration",
    "reward_error",
    "not_valid",
    "full_disk",
    "in_use",
    "interrupted",
    "unknown",
)
_USUAL: dict[Cause, Action] = {
    "OOM": "reduce_batch_size",
    "network_error": "retry_with_backoff",
    "worker_died": "retry",
    "ray_died": "retry",
    "host_memory": "retry",
    "hang": "retry",
    "operator_error": "retry",
    "device_error": "retry",
    **dict.fromkeys(NEVER_RETRIED, "stop"),
}
_SECTION = "retry_options"
_POLICY_BYTES = 1 << 20
_KEYS = ("enable_retry", "max_retry_times", "interval_seconds", "policy_sets")


class PolicyError(ValueError):
    """A policy cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Policy:
    """When and how often a run is started again.

    Attributes:
        enable_retry: whether it is started again at all.
        max_retry_times: most restarts since the newest checkpoint.
        interval_seconds: the wait before a restart; with backoff it doubles each time.
        actions: by cause.
    """

    enable_retry: bool = True
    max_retry_times: int = 5
    interval_seconds: float = 120.0
    actions: Mapping[Cause, Action] = field(default_factory=lambda: dict(_USUAL))


def read_policy(path: Path) -> Policy:
    """Read a policy; causes that it does not list keep their default action.

    Raises:
        PolicyError: no such file, an unknown key, or an invalid value; with the remedy.
    """
    try:
        content = read_yaml(path, _POLICY_BYTES)
    except FileError as error:
        raise PolicyError(f"--policy {error}.") from error
    if not isinstance(content, Mapping) or list(content) != [_SECTION] or not isinstance(content[_SECTION], Mapping):
        raise PolicyError(f"--policy {path} must contain {_SECTION} with only {', '.join(_KEYS)} below it.")
    try:
        return _policy(content[_SECTION])
    except PolicyError as error:
        raise PolicyError(f"--policy {path}: {error}") from error


def _policy(options: Mapping[str, Any]) -> Policy:
    for key in options:
        _one_of(f"{_SECTION} has a key", key, _KEYS)
    enabled = options.get("enable_retry", True)
    if not isinstance(enabled, bool):
        raise PolicyError(f"enable_retry={enabled!r} is invalid. Set it to true or false.")
    times, seconds = options.get("max_retry_times", 5), options.get("interval_seconds", 120)
    if not isinstance(times, int) or isinstance(times, bool) or times < 0:
        raise PolicyError(f"max_retry_times={times!r} is invalid. Set it to a whole number, at least 0.")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= 86400:
        raise PolicyError(f"interval_seconds={seconds!r} is invalid. Set it to seconds from 0 to 86400.")
    sets = options.get("policy_sets", [])
    if not isinstance(sets, list):
        raise PolicyError(f"policy_sets={sets!r} is invalid. Set it to a list of condition and action.")
    return Policy(enabled, times, float(seconds), _USUAL | dict(map(_rule, sets)))


def _rule(entry: Any) -> tuple[Cause, Action]:
    if not isinstance(entry, Mapping) or set(entry) != {"condition", "action"}:
        raise PolicyError(f"policy_sets has an invalid entry {entry!r}: each needs a condition and an action.")
    condition, action = entry["condition"], entry["action"]
    _one_of("a condition is", condition, CAUSES)
    _one_of(f"the action for {condition} is", action, ACTIONS)
    if condition in NEVER_RETRIED and action != "stop":
        raise PolicyError(
            f"the action for {condition} is {action!r}, but it is never retried: the next start would fail again."
        )
    if action == "reduce_batch_size" and condition != "OOM":
        raise PolicyError(
            f"the action for {condition} is {action!r}, which only helps when a die ran out of memory (OOM)."
        )
    return condition, action


def _one_of(what: str, value: Any, known: Collection[str]) -> None:
    if value not in known:
        close = difflib.get_close_matches(str(value), known, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise PolicyError(f"{what} {value!r}{meant}. Set it to one of {', '.join(known)}.")
