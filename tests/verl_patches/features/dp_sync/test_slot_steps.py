"""Slot-steps and their bound as decode loops count them, checked against the lengths of the sequences they ran."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.dp_sync import decode_loop
from verl_patches.features.dp_sync.decode_loop import DecodeLoop
from verl_patches.features.dp_sync.sync_window import LocalState, ReducedState
from verl_patches.features.measure.step_record import StepRecord

LONGEST = 40
SIZES = (1, 2, 4, 8)


class Ranks:
    """Decode loops in threads; their collectives reduce over the threads."""

    def __init__(self, lengths: list[list[int]], limit: int, sizes: Sequence[int]) -> None:
        self.lengths, self.limit, self.sizes = lengths, limit, sizes
        self.barrier = threading.Barrier(len(lengths))
        self.vectors: list[list[int]] = [[] for _ in lengths]
        self.of_thread = threading.local()
        self.agreements: list[ReducedState] = []

    def counted(self) -> list[dict[str, float]]:
        """Run the ranks to their end, and return the metrics of each."""
        with (
            mock.patch.object(decode_loop, "largest", lambda vector, group: self._reduced(max, vector, group)),
            mock.patch.object(decode_loop, "total", lambda vector, group: self._reduced(sum, vector, group)),
            mock.patch.object(decode_loop, "current_record", lambda: self.of_thread.record),
            ThreadPoolExecutor(len(self.lengths)) as threads,
        ):
            return [each.result() for each in [threads.submit(self._run, rank) for rank in range(len(self.lengths))]]

    def _reduced(self, how: Callable[[tuple[int, ...]], int], vector: list[int], rank: int) -> list[int]:
        self.vectors[rank] = vector
        self.barrier.wait()
        found = [how(column) for column in zip(*self.vectors, strict=True)]
        self.barrier.wait()
        return found

    def _run(self, rank: int) -> dict[str, float]:
        self.of_thread.record = StepRecord()
        try:
            self._rollout(rank)
        except BaseException:
            self.barrier.abort()
            raise
        return self.of_thread.record.counts

    def _rollout(self, rank: int) -> None:
        """Prefill all prompts at once, then decode a token of each sequence per forward: the cache holds everything."""
        group = SimpleNamespace(rank_in_group=rank, world_size=len(self.lengths), device_group=rank)
        loop, made, left = DecodeLoop(group, self.limit), 0, list(self.lengths[rank])
        while loop.goes_on(bool(left)):
            if not left:
                loop.idle_step(lambda: self._forward(loop, LocalState(self._padded(1), 1, False, False)))
                continue
            loop._scheduler = _scheduler(left, made)
            tokens = len(left)
            self._forward(loop, LocalState(self._padded(tokens) if made else tokens, tokens, not made, False))
            made += 1
            left = [length for length in left if length > made]

    def _padded(self, tokens: int) -> int:
        return min((size for size in self.sizes if size >= tokens), default=tokens)

    def _forward(self, loop: DecodeLoop, mine: LocalState) -> None:
        agreed = loop.forward(mine, pytest.fail, self.sizes)
        if loop.group.rank_in_group == 0 and not any(agreed is each for each in self.agreements):
            self.agreements.append(agreed)

    @property
    def windows(self) -> list[int]:
        """Return the lengths of the windows without a prompt, in order."""
        return [each.steps for each in self.agreements if not each.with_prefill]


def _scheduler(lengths: list[int], made: int) -> Any:
    """Return the part of a scheduler that the loop reads, with a cache that holds everything."""
    running = [
        SimpleNamespace(
            request_id=number, max_tokens=length, num_output_tokens=made, num_tokens=made, num_computed_tokens=made
        )
        for number, length in enumerate(lengths)
    ]
    cache = SimpleNamespace(coordinator=SimpleNamespace(get_blocks=lambda request: [range(LONGEST)]))
    return SimpleNamespace(
        running=running, waiting=(), max_model_len=10**6, num_spec_tokens=0, block_size=2, kv_cache_manager=cache
    )


def expected(lengths: list[list[int]], windows: list[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Compute (slot-steps, their bound). The prompt's forward gives the first token: a sequence of 3 decodes twice."""

    def size(number: int) -> int:
        return min((each for each in sizes if each >= number), default=number)

    slots = least = step = 0
    for window in windows:
        fullest = max(sum(length > step + 1 for length in of_rank) for of_rank in lengths)
        for _ in range(window):
            slots += len(lengths) * size(max(1, fullest))
            running = sum(length > step + 1 for of_rank in lengths for length in of_rank)
            least += len(lengths) * size((running + len(lengths) - 1) // len(lengths)) if running else 0
            step += 1
    return slots, least


lengths_of_ranks = st.integers(2, 4).flatmap(
    lambda ranks: st.lists(st.lists(st.integers(1, LONGEST), max_size=8), min_size=ranks, max_size=ranks)
)


@settings(max_examples=60)
@given(lengths_of_ranks, st.sampled_from([1, 3, 16]), st.sampled_from([(), SIZES]))
def test_metrics_are_those_of_the_lengths(lengths, limit, sizes):
    ranks = Ranks(lengths, limit, sizes)
    found = [(counts["rollout/slot_steps"], counts["rollout/slot_steps_bound"]) for counts in ranks.counted()]
    assert found == [expected(lengths, ranks.windows, sizes)] * len(lengths)


def test_the_metrics_of_a_small_rollout_by_hand():
    """Lengths 5 2 2 2 | 1 on two ranks: 4 sequences decode once, one of them three more times. With an agreement before
    each forward, graphs have sizes 4 1 1 1; in windows of 3 it is 4 4 4 and then 1 1 1, with two wasted steps. Spread
    evenly over the ranks, 2 1 1 1 would suffice."""
    lengths = [[5, 2, 2, 2], [1]]
    for limit, slots in ((1, 2 * 7), (3, 2 * (3 * 4 + 1))):
        (counts, other) = Ranks(lengths, limit, SIZES).counted()
        assert counts["rollout/slot_steps"] == other["rollout/slot_steps"] == slots
        assert counts["rollout/slot_steps_bound"] == other["rollout/slot_steps_bound"] == 2 * 5


def test_a_loop_that_counts_the_token_of_an_idle_forward_is_found():
    """The control: a rank without requests runs one token, which does not count as a sequence."""

    class OneAtLeast(list[int]):
        def append(self, number: int) -> None:
            super().append(max(1, number))

    def counting_idle(loop: DecodeLoop, group: Any, limit: int) -> None:
        init(loop, group, limit)
        loop._running = OneAtLeast()

    init, lengths = DecodeLoop.__init__, [[12, 12, 12], [2], [2]]
    for change, equal in ((init, True), (counting_idle, False)):
        with mock.patch.object(DecodeLoop, "__init__", change):
            ranks = Ranks(lengths, 16, ())
            found = ranks.counted()[0]["rollout/slot_steps_bound"]
        assert (found == expected(lengths, ranks.windows, ())[1]) == equal
