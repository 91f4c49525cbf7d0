"""Prompts are distributed so that no rank has more long ones than necessary, checked by counting every length."""

from __future__ import annotations

from itertools import combinations
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from post_training.plan.first_placement import expected_lengths, first_placement


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[float], int]:
    ranks, each = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    length = st.integers(0, 12) | st.floats(0, 1e6)
    return draw(st.lists(length, min_size=ranks * each, max_size=ranks * each)), ranks


def parts(lengths: list[float], order: list[int], ranks: int) -> list[list[float]]:
    """Return the lengths that each rank gets when verl splits the batch in this order."""
    each = len(order) // ranks
    return [[lengths[prompt] for prompt in order[rank * each : (rank + 1) * each]] for rank in range(ranks)]


def fullest(of_ranks: list[list[float]], threshold: float) -> int:
    """Return the number of prompts longer than the threshold on the rank that has most of them."""
    return max(sum(length > threshold for length in lengths) for lengths in of_ranks)


def slots(of_ranks: list[list[float]]) -> float:
    """Return the slots that graphs of exact size run: the fullest rank's prompts, summed over all lengths."""
    ends = sorted({0.0, *(length for lengths in of_ranks for length in lengths)})
    return sum((end - begin) * fullest(of_ranks, begin) for begin, end in zip(ends, ends[1:], strict=False))


@given(rollouts())
def test_every_prompt_is_dealt_out_once(rollout):
    lengths, ranks = rollout
    assert sorted(first_placement(lengths, ranks)) == list(range(len(lengths)))


@given(rollouts())
def test_no_rank_ever_has_more_unfinished_prompts_than_it_must(rollout):
    lengths, ranks = rollout
    dealt = parts(lengths, first_placement(lengths, ranks), ranks)
    for threshold in {-1.0, *lengths}:
        assert fullest(dealt, threshold) == ceil(sum(length > threshold for length in lengths) / ranks)


@given(st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_no_other_placement_of_a_small_rollout_needs_fewer_slots(lengths):
    """Compare with every possible placement."""
    everything = range(6)
    others = (
        [[lengths[prompt] for prompt in chosen], [lengths[prompt] for prompt in everything if prompt not in chosen]]
        for chosen in combinations(everything, 3)
    )
    assert slots(parts(lengths, first_placement(lengths, 2), 2)) == min(map(slots, others))


def test_prompts_as_they_come_and_as_sorted_need_more_slots():
    """Control: file order, and order by length, place long prompts side by side."""
    lengths: list[float] = [9, 9, 1, 1, 8, 1]
    dealt = slots(parts(lengths, first_placement(lengths, 3), 3))
    assert dealt < slots(parts(lengths, list(range(6)), 3))
    falling = sorted(range(6), key=lambda prompt: -lengths[prompt])
    assert dealt < slots(parts(lengths, falling, 3))


def test_the_rank_with_fewest_tokens_takes_the_longest():
    assert first_placement([9, 1, 5, 2], 2) == [0, 1, 2, 3]
    assert first_placement([5, 2, 9, 1], 2) == [2, 3, 0, 1]


@pytest.mark.parametrize("ranks", [0, 2])
def test_parts_that_cannot_be_equal_are_an_error(ranks):
    with pytest.raises(ValueError, match=f"3 prompts do not divide among {ranks} ranks"):
        first_placement([1, 2, 3], ranks)


def test_an_unknown_prompt_is_expected_to_be_as_long_as_known_ones():
    assert expected_lengths(["a", "b", "c"], {"a": 2.0, "c": 6.0, "d": 100.0}) == [2.0, 4.0, 6.0]
    assert expected_lengths(["a", "b"], {"d": 100.0}) is None
