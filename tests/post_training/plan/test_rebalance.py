"""Rebalancing of sequences between ranks: none is lost or moved needlessly, and the smallest graph is reached."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from post_training.plan.rebalance import Move, bucket, least_slot_steps, rebalance

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(lambda sizes: [*sizes, 64])


def after(counts: list[int], moves: list[Move]) -> list[int]:
    left = list(counts)
    for move in moves:
        assert move.sequences > 0 and move.source != move.target
        left[move.source] -= move.sequences
        left[move.target] += move.sequences
    return left


@given(st.lists(st.integers(0, 64), min_size=1, max_size=9), SIZES, st.data())
def test_the_smallest_reachable_graph_by_the_fewest_moves(counts, sizes, data):
    headroom = data.draw(st.none() | st.lists(st.integers(0, 64), min_size=len(counts), max_size=len(counts)))
    moves = rebalance(counts, sizes, headroom)
    left = after(counts, moves)
    assert sum(left) == sum(counts) and min(left) >= 0
    reached, present = bucket(max(left), sizes), bucket(max(counts), sizes)
    places = [min(max(0, reached - c), 64 if headroom is None else headroom[rank]) for rank, c in enumerate(counts)]
    assert all(new <= old + place for old, new, place in zip(counts, left, places, strict=True))
    for size in (size for size in sizes if size < reached):
        free = [min(max(0, size - c), 64 if headroom is None else headroom[rank]) for rank, c in enumerate(counts)]
        assert sum(max(0, c - size) for c in counts) > sum(free)
    needed = sum(max(0, c - reached) for c in counts) if reached < present else 0
    assert sum(move.sequences for move in moves) == needed


def test_three_ranks_by_brute_force():
    """For every small split over three ranks, the resulting graph is the smallest that any split reaches."""
    sizes = [1, 2, 3, 6]
    for counts in product(range(7), repeat=3):
        found = bucket(max(after(list(counts), rebalance(counts, sizes))), sizes)
        splits = (split for split in product(range(7), repeat=3) if sum(split) == sum(counts))
        assert found == min(bucket(max(split), sizes) for split in splits)


def test_the_worked_example():
    assert rebalance([5, 1, 0], [1, 2, 8]) == [Move(0, 2, 2), Move(0, 1, 1)]
    assert rebalance([5, 1, 0], [1, 2, 8], headroom=[0, 0, 2]) == []
    assert rebalance([], [1]) == []
    # On a tie the lower rank comes first, both as sender and as receiver.
    assert rebalance([4, 4, 0, 0], [2, 8]) == [Move(0, 2, 2), Move(1, 3, 2)]


# Edge cases that random draws seldom hit: steps without a sequence, the docstring's examples, a full graph.
@example([4, 0, 0], 2, [2, 4, 64])
@example([0, 0], 3, None)
@example([5, 2], 2, None)
@example([5, 2], 2, [2, 4, 64])
@example([8, 9], 2, [4, 8, 64])
@given(st.lists(st.integers(0, 120), max_size=9), st.integers(2, 5), st.none() | SIZES)
def test_the_bound_is_that_of_sequences_dealt_out_one_by_one(running, ranks, sizes):
    places, found = sorted(sizes or range(1, 121)), 0
    for number in running:
        dealt = [len(range(rank, number, ranks)) for rank in range(ranks)]
        if number:
            found += sum(next(size for size in places if size >= max(dealt)) for _ in dealt)
    assert least_slot_steps(running, ranks, sizes or ()) == found


def test_sequences_beyond_the_largest_graph_rejected():
    with pytest.raises(ValueError, match=r"no graph of \[1, 2\] fits 3 sequences"):
        rebalance([3, 0], [2, 1])
