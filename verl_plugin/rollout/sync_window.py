"""A sync window: several forwards for which the data-parallel engines of a rollout synchronise once.

vLLM-Ascend's workers all-reduce the number of their tokens on the host before each forward: engines whose experts form
one model have to lay out their exchanges alike. While all engines decode, each knows the most tokens that it will run
until it admits a request. Within a window no engine admits one, and all of them run as many tokens as the engine with
the most requests had when the window began, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

SETTINGS_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.sync_windows"
EXECUTOR_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend"
EXECUTOR = "verl_plugin.rollout.executor.WindowedExecutor"


class SyncWindowError(RuntimeError):
    """An engine cannot go on with the others. vLLM ends all engines of an instance when one ends."""


@dataclass(frozen=True)
class SyncWindowSettings:
    """The group `actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.sync_windows`.

    Attributes:
        forwards: number of forwards in the longest window; 1 synchronises before each forward.
    """

    forwards: int = 16

    def __post_init__(self) -> None:
        if isinstance(self.forwards, bool) or not isinstance(self.forwards, int) or self.forwards < 1:
            raise ValueError(f"{SETTINGS_KEY}.forwards={self.forwards!r} is invalid. Set it to a whole number above 0.")

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> SyncWindowSettings:
        """Read vLLM's `additional_config`.

        Raises:
            ValueError: an option does not exist or has an invalid value.
        """
        values = (additional_config or {}).get("sync_windows") or {}
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"{SETTINGS_KEY}.{name} is invalid: no such option. Set one of {', '.join(known)}.")
        return cls(**values)


@dataclass(frozen=True)
class Offer:
    """Local state of an engine that is about to run a forward.

    Attributes:
        requests: upper bound of the tokens in this forward and, if the engine decodes, in those that follow.
        decodes: each request runs one token, in this forward and in those that follow.
        work: upper bound of the forwards until its last request ends, this one included; 0 without requests.
    """

    requests: int
    decodes: bool
    work: int


IDLE = Offer(1, True, 0)
"""An engine without requests runs a forward of one token, because others wait for its experts."""


class SyncWindow:
    """The window of one engine.

    Attributes:
        left: forwards that are left in the window.
        forwards: number of forwards that this engine has run.
        agreements: number of times that the engines have synchronised.

    Args:
        rank: of the engine.
        limit: number of forwards in the longest window.
        reduce: returns the largest value of each element over all engines.
    """

    def __init__(self, rank: int, limit: int, reduce: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.left = self.forwards = self.agreements = 0
        self._rank, self._limit, self._reduce = rank, limit, reduce
        self._tokens: int | None = None

    def take(self, offer: Offer) -> int | None:
        """Count one forward; synchronise first if no window is open.

        Returns:
            The number of tokens that each engine runs, padding included; None if the workers are to synchronise as
            upstream.

        Raises:
            SyncWindowError: the forward does not fit the window, or engines have run different numbers of forwards.
        """
        if not self.left:
            self._agree(offer)
        if self._tokens is not None and not (offer.decodes and offer.requests <= self._tokens):
            raise SyncWindowError(
                f"rollout engine {self._rank} cannot keep its sync window: it has {offer.requests} tokens, but "
                f"{self._tokens} were agreed on. Set {SETTINGS_KEY}.forwards to 1, and report it."
            )
        self.left -= 1
        self.forwards += 1
        return self._tokens

    def _agree(self, offer: Offer) -> None:
        vector = [offer.requests, int(not offer.decodes), offer.work, self.forwards, -self.forwards]
        tokens, mixed, work, most, least = self._reduce(vector)
        self.agreements += 1
        if most != -least:
            raise SyncWindowError(f"rollout engines have made different numbers of forwards, from {-least} to {most}")
        self._tokens = None if mixed else tokens
        self.left = 1 if mixed else max(1, min(self._limit, work))
