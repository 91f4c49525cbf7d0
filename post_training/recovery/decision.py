"""Decide whether a failed run is started again, when, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from post_training.recovery.causes import Failure
from post_training.recovery.policy import Policy
from post_training.recovery.reduction import EXACT_LOSS, reduced
from post_training.report.run_folder import at

_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True)
class Attempt:
    """How a start of the run ended.

    Attributes:
        step: the last training step that ended, 0 if none did.
        checkpoint: the step of the newest complete checkpoint, 0 if there is none.
        config: the resolved configuration, empty if the run failed before writing it.
        nodes: number of nodes that it ran on; None if that never changes.
    """

    failure: Failure
    step: int
    checkpoint: int
    config: Mapping[str, Any] = field(default_factory=dict)
    nodes: int | None = None

    @property
    def what_failed(self) -> tuple[str, int, int | None]:
        """Key by which a repeated failure is recognised. It includes the nodes, as two may be lost after one step."""
        return self.failure.cause, self.step, self.nodes


@dataclass(frozen=True)
class Again:
    """Start again after ``wait_s`` seconds, with the overrides of all reductions so far."""

    wait_s: float
    overrides: Mapping[str, int | float]


@dataclass(frozen=True)
class Enough:
    """Do not start again; ``reason`` is a clause."""

    reason: str


class Supervision:
    """The failures of one supervised run so far. Call ``decide`` after every start that failed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._last: Attempt | None = None
        self._retries = self._refused_connections = 0
        self._overrides: dict[str, int | float] = {}

    def decide(self, attempt: Attempt) -> Again | Enough:
        """Decide what follows a failed attempt."""
        policy, failure, last = self._policy, attempt.failure, self._last
        self._last = attempt
        if last is None or attempt.checkpoint > last.checkpoint:
            self._retries = self._refused_connections = 0
        action = policy.actions[failure.cause]
        if not policy.enable_retry:
            return Enough("enable_retry is false")
        if action == "stop":
            return Enough(f"{failure.cause} is not retried")
        if self._retries >= policy.max_retry_times:
            return Enough(f"max_retry_times is {policy.max_retry_times}, and there is no checkpoint since")
        if action == "reduce_batch_size":
            smaller = reduced(attempt.config, failure.stage)
            if not smaller:
                return Enough(_why_not_smaller(attempt))
            self._overrides |= smaller
        elif action == "retry" and last and last.what_failed == attempt.what_failed:
            return Enough(f"{failure.cause} twice after step {attempt.step}")
        self._retries += 1
        return Again(self._wait(action == "retry_with_backoff"), dict(self._overrides))

    def _wait(self, backs_off: bool) -> float:
        if not backs_off:
            self._refused_connections = 0
            return self._policy.interval_seconds
        wait = min(self._policy.interval_seconds * 2**self._refused_connections, _LONGEST_WAIT_S)
        self._refused_connections += 1
        return wait


def _why_not_smaller(attempt: Attempt) -> str:
    if not attempt.config:
        return "the run ended before it wrote its configuration"
    if attempt.failure.stage != "log_prob" and not at(attempt.config, EXACT_LOSS):
        return f"smaller micro batches would change the gradients while {EXACT_LOSS} is false"
    return "micro batches, sequences in flight and the cache's share are already at their minimum"
