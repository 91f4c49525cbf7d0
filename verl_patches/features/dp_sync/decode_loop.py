"""The decode loop of a vLLM engine within a sync window: the limits of its scheduler, and the promises it can make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from post_training.plan.rebalance import least_slot_steps
from post_training.process_context import process_context
from verl_patches.features.dp_sync.agreement import largest, total
from verl_patches.features.dp_sync.sync_window import (
    LocalState,
    Progress,
    ReducedState,
    SyncWindow,
    decide,
    encode,
    steps_in_hand,
)
from verl_patches.features.measure.step_record import current_record

METRICS = (
    "agreements",
    "decode_steps",
    "prefill_steps",
    "idle_steps",
    "wasted_steps",
    "slot_steps",
    "slot_steps_bound",
)


class RequestMigration(Protocol):
    """Hooks of a feature that moves requests between engines at the end of a window."""

    migrated_out: set[str]

    def plan(self, agreed: ReducedState, graph_sizes: Sequence[int]) -> bool:
        """Return whether requests move after the forward that has just been agreed on; the same on all ranks."""

    def ended(self) -> None:
        """Take note that no rank has unfinished requests."""


class EarlyEnd(Protocol):
    """Hooks of a feature that ends a rollout although requests are unfinished."""

    def counted(self, offer: LocalState) -> LocalState:
        """Return `offer` with the counts that decide the early end."""

    def decide(self, agreed: ReducedState) -> bool:
        """Return whether the rollout ends after the forward that has just been agreed on; the same on all ranks."""


class DecodeLoop:
    """One engine among the data-parallel engines of an instance. `group` is vLLM's data-parallel group."""

    def __init__(self, group: Any, limit: int) -> None:
        self.group = group
        self.window = SyncWindow(group.rank_in_group, group.world_size, limit)
        self._unfinished = False
        self._idle = False
        self.migration: RequestMigration | None = None
        self.early_end: EarlyEnd | None = None
        self._scheduler: Any = None
        self._running: list[int] = []
        self._graph_sizes: Sequence[int] = ()

    def goes_on(self, unfinished: bool) -> bool:
        """Return whether the engine makes another forward, without any exchange: the last agreement tells about others.

        Args:
            unfinished: the engine has unfinished requests of its own.
        """
        self._unfinished = unfinished
        if not self.window.going:
            self._running.clear()
        return self.window.goes_on()

    def step(self, core: Any, step: Callable[[], Any]) -> Any:
        """Run one step of vLLM's EngineCore; if it schedules nothing, run a dummy forward, because other ranks wait for
        this rank's experts."""
        before = self.window.progress.forwards
        self._scheduler = core.scheduler
        with self._holding_still(core.scheduler) if self.window.left else _reserving(core.scheduler, self.window.limit):
            outputs = step()
        if self.window.progress.forwards == before:
            core.execute_dummy_batch()
        return outputs

    def idle_step(self, run: Callable[[], Any], scheduler: Any = None) -> None:
        """Run a forward without requests, unless all ranks find that none has any. `scheduler`: the engine's."""
        window = self.window
        self._scheduler = scheduler or self._scheduler
        if not window.left:
            steps, work = (1, window.limit) if self._stuck() else (window.limit, 0)
            if not self._agree(self._with_counts(LocalState(1, 1, False, False, steps, work))).unfinished:
                self._count_bound()
                if self.migration is not None:
                    self.migration.ended()
                return
        self._idle = True
        try:
            run()
        finally:
            self._idle = False

    def forward(self, mine: LocalState, stand_in: Callable[[], Any], graph_sizes: Sequence[int] = ()) -> ReducedState:
        """Return the agreement under which this rank runs `mine`. Synchronises only between windows.

        Args:
            mine: the forward that this rank is about to run.
            stand_in: runs a forward without requests. A rank that cannot keep its window uses it to reach the window's
                end, where all ranks raise; stopping earlier would leave the others waiting.
            graph_sizes: of the graphs that decode, the same on all ranks; none without graphs.

        Raises:
            SyncWindowError: see `sync_window.decide`.
        """
        window = self.window
        self._graph_sizes = graph_sizes
        if not window.left:
            self._agree(mine if self._idle else self._with_counts(_promise(mine, self._scheduler, window.limit)))
        elif not window.fits(mine):
            window.cannot_keep()
            while window.left:
                self.idle_step(stand_in)
            self._agree(mine)
        agreed = window.agreement
        assert agreed is not None
        window.take(self._idle)
        _count(decode_steps=not agreed.with_prefill, prefill_steps=agreed.with_prefill, idle_steps=self._idle)
        if not agreed.with_prefill:
            self._running.append(0 if self._idle else mine.tokens)
            _count(slot_steps=len(agreed.padded_tokens) * max(agreed.padded_tokens))
        return agreed

    def _agree(self, offer: LocalState) -> ReducedState:
        offer = self.early_end.counted(offer) if self.early_end is not None else offer
        agreed = self.window.accept(largest(self.window.vector(offer), self.group.device_group))
        _count(agreements=1, wasted_steps=0 if agreed.unfinished else agreed.wasted)
        if self.migration is not None and agreed.unfinished and self.migration.plan(agreed, self._graph_sizes):
            self.window.end_after_next()
        if self.early_end is not None and agreed.unfinished and self.early_end.decide(agreed):
            self.window.end_after_next()
        return agreed

    def _stuck(self) -> bool:
        """Return whether the engine has requests of its own that do not run, not counting migrated ones."""
        if self.migration is None or not self.migration.migrated_out:
            return self._unfinished
        return self._scheduler.has_unfinished_requests()

    def _with_counts(self, offer: LocalState) -> LocalState:
        """Return `offer` with the counts that decide whether requests move, if they may."""
        scheduler = self._scheduler
        if self.migration is None or scheduler is None:
            return offer
        running, waiting = len(scheduler.running), bool(scheduler.waiting)
        return replace(offer, running=running, headroom=max(0, _most_requests(scheduler) - running), waiting=waiting)

    def _count_bound(self) -> None:
        """Count the slot steps that the rollout's decode steps would have needed with their sequences spread evenly.

        One exchange after a rollout. All ranks have made the same forwards, so their lists are of one length; an extra
        0 keeps them from being empty.
        """
        running = total([*self._running, 0], self.group.device_group)
        _count(slot_steps_bound=least_slot_steps(running, self.group.world_size, self._graph_sizes))

    @contextmanager
    def _holding_still(self, scheduler: Any) -> Iterator[None]:
        """Admit no waiting request within a window; a request that loses its blocks breaks the window."""
        waiting, scheduler.waiting = scheduler.waiting, type(scheduler.waiting)()
        try:
            yield
        finally:
            preempted, scheduler.waiting = scheduler.waiting, waiting
            if preempted:
                self.window.cannot_keep()
                waiting.extendleft(reversed(preempted))


@contextmanager
def _reserving(scheduler: Any, limit: int) -> Iterator[None]:
    """Let the scheduler allot the blocks of `limit` forwards at once to every request that it schedules.

    The scheduler allots and preempts as usual; it only looks further ahead. If the cache cannot hold the longest
    sequence, looking ahead could keep a request out forever, so then the window lasts as long as the allotted blocks.
    """
    blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one block is vLLM's own
    ahead = limit - 1 if blocks * scheduler.block_size >= scheduler.max_model_len else 0
    scheduler.num_lookahead_tokens += ahead
    try:
        yield
    finally:
        scheduler.num_lookahead_tokens -= ahead


def _promise(mine: LocalState, scheduler: Any, limit: int) -> LocalState:
    """Return `mine` with the steps and the work that the engine can promise once it has scheduled this forward."""
    running = scheduler.running
    needed = [_forwards_needed(request, scheduler.max_model_len) for request in running]
    work = limit if scheduler.waiting else min(limit, max(needed, default=1))
    decodes = not mine.with_prefill and not scheduler.num_spec_tokens and mine.tokens == len(running)
    if not decodes or any(request.num_computed_tokens != request.num_tokens for request in running):
        return replace(mine, work=work)
    slots = [_slots_left(request, scheduler) for request in running]
    return replace(mine, steps=steps_in_hand(zip(slots, needed, strict=True), limit), work=work)


def _most_requests(scheduler: Any) -> int:
    """Return how many requests the engine can run at a time even if all of them have the greatest length."""
    blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    longest = -(-scheduler.max_model_len // scheduler.block_size)
    return min(scheduler.max_num_running_reqs, blocks // longest)


def _forwards_needed(request: Any, longest: int) -> int:
    """Return the most forwards until the request ends, including the one that is about to run."""
    return max(1, min(request.max_tokens - request.num_output_tokens, longest - request.num_tokens))


def _slots_left(request: Any, scheduler: Any) -> int:
    """Return for how many tokens the request holds blocks, beyond those of the forward that is about to run."""
    groups = scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)
    return min(len(blocks) for blocks in groups) * scheduler.block_size - request.num_computed_tokens


def _count(**amounts: float) -> None:
    """Count every metric at every event, if need be with 0, so that all ranks have the same metrics."""
    for name in METRICS:
        current_record().count(f"rollout/{name}", amounts.get(name, 0))


def loop_of(group: Any, limit: int) -> DecodeLoop:
    """Return the loop of this process's engine, whose data-parallel group is `group`."""
    loop = process_context().find(DecodeLoop)
    if loop is None or loop.group is not group or loop.window.limit != limit:
        loop = process_context().keep(DecodeLoop(group, limit))
    return loop


def going() -> DecodeLoop | None:
    """Return the loop of the rollout in progress in this process; None if there is none."""
    loop = process_context().find(DecodeLoop)
    return loop if loop is not None and loop.window.going else None


def agree_once(mine: LocalState, group: Any) -> ReducedState:
    """Agree on one forward outside a rollout, such as a warm-up."""
    ranks = group.world_size
    reduced = largest(encode(mine, Progress(), group.rank_in_group, ranks), group.device_group, in_rollout=False)
    return decide(reduced, ranks, limit=1)
