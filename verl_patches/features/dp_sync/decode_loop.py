"""The decode loop of a vLLM engine within a sync window: what its scheduler may do, and what it can promise."""

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
    """What moves requests between engines at the end of a window, where a feature does so."""

    migrated_out: set[str]

    def plan(self, agreed: ReducedState, graph_sizes: Sequence[int]) -> bool:
        """Whether requests move after the forward that has just been agreed on; the same on all ranks."""

    def ended(self) -> None:
        """No rank has unfinished requests."""


class EarlyEnd(Protocol):
    """What decides that a rollout ends although requests are unfinished, where a feature does so."""

    def counted(self, offer: LocalState) -> LocalState:
        """`offer` with what decides it."""

    def decide(self, agreed: ReducedState) -> bool:
        """Whether the rollout ends after the forward that has just been agreed on; the same on all ranks."""


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
        """Whether the engine makes another forward; `unfinished`: it has unfinished requests of its own. Exchanges
        nothing: what others have is known from the last agreement."""
        self._unfinished = unfinished
        if not self.window.going:
            self._running.clear()
        return self.window.goes_on()

    def step(self, core: Any, step: Callable[[], Any]) -> Any:
        """One step of vLLM's EngineCore. A step that schedules nothing makes a forward too, as the others wait for its
        experts."""
        before = self.window.progress.forwards
        self._scheduler = core.scheduler
        with self._holding_still(core.scheduler) if self.window.left else _reserving(core.scheduler, self.window.limit):
            outputs = step()
        if self.window.progress.forwards == before:
            core.execute_dummy_batch()
        return outputs

    def idle_step(self, run: Callable[[], Any], scheduler: Any = None) -> None:
        """A forward without requests, unless all ranks find that nobody has any. `scheduler`: the engine's."""
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
        """The agreement under which this rank runs `mine`. Synchronises only between windows.

        stand_in: runs a forward without requests. With it a rank that cannot keep its window gets to the window's end,
        where all ranks raise; to stop earlier would leave the others waiting.
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
        """Whether the engine has requests of its own that do not run, other than those that run elsewhere."""
        if self.migration is None or not self.migration.migrated_out:
            return self._unfinished
        return self._scheduler.has_unfinished_requests()

    def _with_counts(self, offer: LocalState) -> LocalState:
        """`offer` with what decides whether requests move, if they may."""
        scheduler = self._scheduler
        if self.migration is None or scheduler is None:
            return offer
        running, waiting = len(scheduler.running), bool(scheduler.waiting)
        return replace(offer, running=running, headroom=max(0, _most_requests(scheduler) - running), waiting=waiting)

    def _count_bound(self) -> None:
        """After a rollout, in one exchange: what its decode steps would have needed with their sequences spread evenly.
        All ranks have made the same forwards, so their lists are of one length; a 0 more, and none is empty."""
        running = total([*self._running, 0], self.group.device_group)
        _count(slot_steps_bound=least_slot_steps(running, self.group.world_size, self._graph_sizes))

    @contextmanager
    def _holding_still(self, scheduler: Any) -> Iterator[None]:
        """Within a window no waiting request is admitted, and a request that loses its blocks breaks the window."""
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
    """What is scheduled now gets the blocks of `limit` forwards at once, or waits.

    The scheduler allots and preempts as ever; it only looks further ahead. Where the cache does not hold the longest
    sequence, that could keep a request out for ever, and the window is as long as the blocks in hand.
    """
    blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one block is vLLM's own
    ahead = limit - 1 if blocks * scheduler.block_size >= scheduler.max_model_len else 0
    scheduler.num_lookahead_tokens += ahead
    try:
        yield
    finally:
        scheduler.num_lookahead_tokens -= ahead


def _promise(mine: LocalState, scheduler: Any, limit: int) -> LocalState:
    """`mine` with what the engine can promise after it has scheduled this forward."""
    running = scheduler.running
    needed = [_forwards_needed(request, scheduler.max_model_len) for request in running]
    work = limit if scheduler.waiting else min(limit, max(needed, default=1))
    decodes = not mine.with_prefill and not scheduler.num_spec_tokens and mine.tokens == len(running)
    if not decodes or any(request.num_computed_tokens != request.num_tokens for request in running):
        return replace(mine, work=work)
    slots = [_slots_left(request, scheduler) for request in running]
    return replace(mine, steps=steps_in_hand(zip(slots, needed, strict=True), limit), work=work)


def _most_requests(scheduler: Any) -> int:
    """Requests that the engine surely runs at a time, were all of them as long as any may be."""
    blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    longest = -(-scheduler.max_model_len // scheduler.block_size)
    return min(scheduler.max_num_running_reqs, blocks // longest)


def _forwards_needed(request: Any, longest: int) -> int:
    """At most so many forwards until the request ends, the one that is about to run included."""
    return max(1, min(request.max_tokens - request.num_output_tokens, longest - request.num_tokens))


def _slots_left(request: Any, scheduler: Any) -> int:
    """Tokens for which the request holds blocks beyond those of the forward that is about to run."""
    groups = scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)
    return min(len(blocks) for blocks in groups) * scheduler.block_size - request.num_computed_tokens


def _count(**amounts: float) -> None:
    """Every metric is counted at every event, so that all ranks have the same metrics."""
    for name in METRICS:
        current_record().count(f"rollout/{name}", amounts.get(name, 0))


def loop_of(group: Any, limit: int) -> DecodeLoop:
    """The loop of this process's engine, whose data-parallel group is `group`."""
    loop = process_context().find(DecodeLoop)
    if loop is None or loop.group is not group or loop.window.limit != limit:
        loop = process_context().keep(DecodeLoop(group, limit))
    return loop


def going() -> DecodeLoop | None:
    """The loop of the rollout that goes on in this process."""
    loop = process_context().find(DecodeLoop)
    return loop if loop is not None and loop.window.going else None


def agree_once(mine: LocalState, group: Any) -> ReducedState:
    """Agree on one forward outside a rollout, such as a warm-up."""
    ranks = group.world_size
    reduced = largest(encode(mine, Progress(), group.rank_in_group, ranks), group.device_group, in_rollout=False)
    return decide(reduced, ranks, limit=1)
