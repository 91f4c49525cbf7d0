"""Sync windows: how many forwards data-parallel rollout ranks make before they synchronise again.

Ranks whose experts form one model must make the same forwards with the same padding. They reduce one vector, and its
result is valid for a window of several forwards: no rank admits a prompt, each runs at most the tokens it announced,
and idle ranks run dummy forwards. A rank can promise this because the KV cache blocks of its requests are reserved.
Every decision follows from the reduced vector alone, so no two ranks decide differently.

This file is arithmetic on integers; `decode_loop` asks the engine, and `agreement` the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class SyncWindowError(RuntimeError):
    """A rank could not keep its promise, or the ranks did not make the same forwards; raised on every rank."""


@dataclass(frozen=True)
class LocalState:
    """State of one rank before the reduction: the forward it is about to run, and the promises it can make.

    Attributes:
        padded_tokens: token count with padding.
        tokens: token count without padding.
        with_prefill: a prompt is among them.
        two_batches: the rank could split its batch into two that overlap.
        steps: forwards, this one included, that it can make without a prompt and without preempting a request.
        work: forwards, this one included, that its requests may still need; 0 if none is unfinished.
        running: requests that run.
        headroom: how many more requests could run.
        waiting: further requests wait.
        finished: groups of answers that are finished, if a rollout may end early.
        held: a group that must finish in this rollout has not.
    """

    padded_tokens: int
    tokens: int
    with_prefill: bool
    two_batches: bool
    steps: int = 1
    work: int = 1
    running: int = 0
    headroom: int = 0
    waiting: bool = False
    finished: int = 0
    held: bool = False


@dataclass(frozen=True)
class ReducedState:
    """State that all ranks share after the reduction.

    Attributes:
        padded_tokens, tokens: by rank, at the beginning of the window.
        with_prefill, waiting, held: on any rank.
        two_batches: on all ranks.
        steps: forwards of the window; 0 if no rank has unfinished requests.
        wasted: forwards that all ranks have just made without a request.
        running, headroom, finished: by rank, as in LocalState.
    """

    padded_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    with_prefill: bool
    two_batches: bool
    steps: int
    wasted: int
    running: tuple[int, ...] = ()
    headroom: tuple[int, ...] = ()
    waiting: bool = False
    finished: tuple[int, ...] = ()
    held: bool = False

    @property
    def unfinished(self) -> bool:
        """Whether any rank has unfinished requests."""
        return self.steps > 0


@dataclass(frozen=True)
class Progress:
    """Progress of one rank since its rollout began.

    Attributes:
        forwards: forwards so far.
        idle: how many of the last forwards in a row had no request.
        broken: whether it broke a window.
    """

    forwards: int = 0
    idle: int = 0
    broken: bool = False


def encode(offer: LocalState, progress: Progress, rank: int, ranks: int) -> list[int]:
    """Encode the rank's state as a vector of 5 x ranks + 10 integers, to be reduced by MAX.

    For rank 1 of 2 with 3 tokens padded to 4, of 3 requests, with room for 5 more and 6 groups finished: `[0, 4, 0, 3,
    0, 3, 0, 5, 0, 6, prefill, not two_batches, waiting, held, -steps, work, culprit, forwards, -forwards, -idle]`.
    """
    vector = [0] * (5 * ranks)
    vector[rank::ranks] = offer.padded_tokens, offer.tokens, offer.running, offer.headroom, offer.finished
    culprit = rank + 1 if progress.broken else 0
    flags = [int(offer.with_prefill), int(not offer.two_batches), int(offer.waiting), int(offer.held)]
    return [*vector, *flags, -offer.steps, offer.work, culprit, progress.forwards, -progress.forwards, -progress.idle]


def decide(reduced: Sequence[int], ranks: int, limit: int) -> ReducedState:
    """Decode the reduced vector, which all ranks share. A window has at most `limit` forwards, and one with a prompt.

    Raises:
        SyncWindowError: a rank has broken its window, or the ranks have not made the same number of forwards.
    """
    prefill, split, waiting, held, steps, work, culprit, most, least, idle = reduced[5 * ranks :]
    if culprit:
        raise SyncWindowError(
            f"rollout rank {culprit - 1} could not keep its sync window. Set "
            "actor_rollout_ref.overlay.dp_sync.lease_steps=1 to continue, and report it"
        )
    if most != -least:
        raise SyncWindowError(f"rollout ranks have made different numbers of forwards, from {-least} to {most}")
    length = 1 if prefill else max(1, min(limit, -steps, work))
    padded_tokens, tokens, running, headroom, finished = (
        tuple(reduced[part * ranks : (part + 1) * ranks]) for part in range(5)
    )
    return ReducedState(
        padded_tokens=padded_tokens,
        tokens=tokens,
        with_prefill=bool(prefill),
        two_batches=not split,
        steps=length if work else 0,
        wasted=-idle,
        running=running,
        headroom=headroom,
        waiting=bool(waiting),
        finished=finished,
        held=bool(held),
    )


def steps_in_hand(requests: Iterable[tuple[int, int]], limit: int) -> int:
    """Return the forwards that a rank can promise, at most `limit`: until a request of its own would need a new block.

    With 2 free slots a request makes this forward and two more; one that needs only 3 forwards never asks for a block.

    Args:
        requests: (free slots that the request holds beyond this forward, forwards that it may still need).
        limit: most forwards of a window.
    """
    return min([limit, *(slots + 1 for slots, needed in requests if needed > slots + 1)])


class SyncWindow:
    """The window of one rank: when it must synchronise, and what it may run until then."""

    def __init__(self, rank: int, ranks: int, limit: int) -> None:
        self.rank, self.ranks, self.limit = rank, ranks, limit
        self.going = False
        self.left = 0
        self.agreement: ReducedState | None = None
        self.progress = Progress()

    def goes_on(self) -> bool:
        """Return whether this rank makes another forward. The first call begins a rollout and is always True, because
        only an agreement can tell that no rank has work."""
        if not self.going:
            self.going, self.left, self.agreement, self.progress = True, 0, None, Progress()
        elif not self.left and self.agreement is not None and not self.agreement.unfinished:
            self.going = False
        return self.going

    def vector(self, offer: LocalState) -> list[int]:
        """Return this rank's vector for the next agreement."""
        return encode(offer, self.progress, self.rank, self.ranks)

    def accept(self, reduced: Sequence[int]) -> ReducedState:
        """Begin the window that the reduced vector describes.

        Raises:
            SyncWindowError: see `decide`; the rollout ends.
        """
        try:
            self.agreement = decide(reduced, self.ranks, self.limit)
        except SyncWindowError:
            self.going = False
            raise
        self.left = self.agreement.steps
        return self.agreement

    def end_after_next(self) -> None:
        """Shorten the window that has just begun to one forward; every rank must call this."""
        self.left = min(self.left, 1)

    def fits(self, offer: LocalState) -> bool:
        """Return whether a forward keeps to the window's limits. A rank without work runs one dummy token."""
        agreed = self.agreement
        assert agreed is not None and self.left
        return offer.with_prefill <= agreed.with_prefill and offer.tokens <= max(1, agreed.tokens[self.rank])

    def take(self, idle: bool) -> None:
        """Make one forward of the window."""
        self.left -= 1
        done = self.progress
        self.progress = Progress(done.forwards + 1, done.idle + 1 if idle else 0, done.broken)

    def cannot_keep(self) -> None:
        """Record that this rank broke the window. It goes on to the window's end, where all ranks learn of it."""
        self.progress = Progress(self.progress.forwards, self.progress.idle, broken=True)
