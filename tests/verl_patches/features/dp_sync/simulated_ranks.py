"""Rollout ranks in lockstep: the real sync window, and a scheduler with blocks, preemption and late prompts.

A rank is a generator. It yields `("agree", vector)` and gets the reduced vector back, or `("forward", what)` for a
forward of the model. On devices, two ranks that yield different events would deadlock; here that raises `Diverged`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from verl_patches.features.dp_sync.sync_window import LocalState, SyncWindow, SyncWindowError, steps_in_hand

Event = tuple[str, Any]
MOST_EVENTS = 20_000


class Diverged(AssertionError):
    """The ranks would deadlock."""


@dataclass
class Sequence:
    """One request: `prompt` tokens, then `length` more; it arrives once the rank has made `arrives` forwards."""

    prompt: int
    length: int
    arrives: int = 0
    done: int = 0
    cached: int = 0
    blocks: int = 0


@dataclass
class Rank:
    """An engine: its sync window, its KV cache of `blocks` blocks of `block_size` tokens, and its requests."""

    window: SyncWindow
    sequences: list[Sequence]
    blocks: int
    block_size: int = 4
    most_running: int = 4
    overstates: bool = False
    sneaks_prompts_in: bool = False
    forwards: int = 0
    prefills: int = 0
    preempted: int = 0
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)

    def rollout(self) -> Generator[Event, Any, None]:
        """Yield the rank's events until no rank has unfinished requests."""
        window = self.window
        while window.goes_on():
            self._receive()
            if not self.running and not self.waiting:
                yield from self._idle(unfinished=False)
                continue
            held = deque() if window.left and not self.sneaks_prompts_in else self.waiting
            lost = self.preempted
            prompt, tokens = self._schedule(held, ahead=0 if window.left or self.overstates else window.limit - 1)
            if window.left and self.preempted > lost:
                window.cannot_keep()
            self.waiting.extendleft(reversed(held if held is not self.waiting else ()))
            if not tokens:
                yield from self._idle(unfinished=True)
                continue
            mine = self._promise(LocalState(tokens, tokens, prompt, False))
            if not window.left:
                window.accept((yield "agree", window.vector(mine)))
            elif not window.fits(mine):
                window.cannot_keep()
                while window.left:
                    yield from self._forward(idle=True)
                window.accept((yield "agree", window.vector(mine)))
            yield from self._forward(idle=False)
            self._sample()

    def _receive(self) -> None:
        now = [each for each in self.sequences if each.arrives <= self.forwards]
        self.waiting.extend(now)
        self.sequences = [each for each in self.sequences if each.arrives > self.forwards]

    def _idle(self, unfinished: bool) -> Generator[Event, Any, None]:
        if not self.window.left:
            steps, work = (1, self.window.limit) if unfinished else (self.window.limit, 0)
            offer = LocalState(1, 1, False, False, steps, work)
            if not self.window.accept((yield "agree", self.window.vector(offer))).unfinished:
                return
        yield from self._forward(idle=True)

    def _forward(self, idle: bool) -> Generator[Event, Any, None]:
        agreed = self.window.agreement
        assert agreed is not None
        self.window.take(idle)
        self.forwards += 1
        self.prefills += agreed.with_prefill
        yield "forward", (agreed.with_prefill, max(agreed.padded_tokens))

    def _schedule(self, waiting: deque[Sequence], ahead: int) -> tuple[bool, int]:
        """Schedule prompts first, as vLLM-Ascend does. Return whether there is a prompt, and the number of tokens."""
        prompts = []
        while waiting and len(self.running) < self.most_running and self._allot(waiting[0], waiting[0].done, ahead):
            prompts.append(waiting.popleft())
            self.running.append(prompts[-1])
        if prompts:
            for each in prompts:
                each.cached = each.prompt + each.done
            self._scheduled = prompts
            return True, sum(each.cached for each in prompts)
        self._scheduled = []
        for each in list(self.running):
            while each in self.running and not self._allot(each, each.done, ahead):
                last = self.running.pop()
                last.blocks = last.cached = 0
                self.preempted += 1
                waiting.appendleft(last)
            if each in self.running:
                each.cached += 1
                self._scheduled.append(each)
        return False, len(self._scheduled)

    def _allot(self, each: Sequence, done: int, ahead: int) -> bool:
        """Allocate blocks for all tokens so far and `ahead` more. Return whether there were enough free blocks."""
        wanted = math.ceil(min(each.prompt + done + ahead, each.prompt + each.length) / self.block_size)
        free = self.blocks - sum(other.blocks for other in self.running)
        if wanted - each.blocks > free:
            return False
        each.blocks = max(each.blocks, wanted)
        return True

    def _promise(self, mine: LocalState) -> LocalState:
        limit = self.window.limit
        needed = [each.length - each.done for each in self.running]
        work = limit if self.waiting else min(limit, max(needed))
        if mine.with_prefill or mine.tokens < len(self.running):
            return replace(mine, work=work)
        slots = [each.blocks * self.block_size - each.cached for each in self.running]
        steps = limit if self.overstates else steps_in_hand(zip(slots, needed, strict=True), limit)
        return replace(mine, steps=steps, work=work)

    def _sample(self) -> None:
        for each in self._scheduled:
            each.done += 1
            if each.done == each.length:
                self.running.remove(each)


@dataclass
class Totals:
    """Counts until all ranks have ended. They are the same on every rank, otherwise `run` raises `Diverged`."""

    agreements: int = 0
    forwards: int = 0
    errors: list[str] = field(default_factory=list)


def run(ranks: list[Rank]) -> Totals:
    """Run the rollouts of all ranks in lockstep."""
    totals, loops = Totals(), [rank.rollout() for rank in ranks]
    answers: list[Any] = [None] * len(ranks)
    for _ in range(MOST_EVENTS):
        events: list[Event] = []
        for loop, answer in zip(loops, answers, strict=True):
            try:
                events.append(loop.send(answer))
            except StopIteration:
                events.append(("end", None))
            except SyncWindowError as error:
                events.append(("error", None))
                totals.errors.append(str(error))
        kinds = {kind for kind, _ in events}
        if len(kinds) > 1 or (kinds == {"forward"} and len({str(what) for _, what in events}) > 1):
            raise Diverged(str(events))
        if kinds <= {"end", "error"}:
            return totals
        if kinds == {"agree"}:
            totals.agreements += 1
            answers = [[max(column) for column in zip(*(vector for _, vector in events), strict=True)]] * len(ranks)
        else:
            totals.forwards += 1
            answers = [None] * len(ranks)
    raise Diverged(f"no end after {MOST_EVENTS} events")
