"""Micro batches by tokens: each sequence once, the limit exceeded only by a lone sequence, and little wasted space."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.dynamic_batches.packing import first_fit, spread

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=40)


def totals(lengths, bins):
    return [sum(lengths[each] for each in chosen) for chosen in bins]


def assert_whole(lengths, bins, limit):
    assert sorted(each for chosen in bins for each in chosen) == list(range(len(lengths)))
    assert all(bins)
    for chosen, total in zip(bins, totals(lengths, bins), strict=True):
        assert total <= limit or len(chosen) == 1


@settings(max_examples=100)
@given(lengths=LENGTHS, limit=st.integers(1, 120))
def test_first_fit_never_leaves_two_that_fit_together(lengths, limit):
    bins = first_fit(lengths, limit)
    assert_whole(lengths, bins, limit)
    two = sorted(totals(lengths, bins))[:2]
    assert len(two) < 2 or sum(two) > limit


@settings(max_examples=150)
@given(lengths=LENGTHS, limit=st.integers(1, 120), more=st.integers(0, 40))
def test_any_number_that_is_possible_keeps_to_the_limit(lengths, limit, more):
    number = min(len(lengths), len(first_fit(lengths, limit)) + more)
    bins = spread(lengths, limit, number)
    assert len(bins) == number
    assert_whole(lengths, bins, limit)
    assert bins == spread(lengths, limit, number), "every rank of a replica plans alike"


def test_the_example_of_the_docstring():
    lengths = [5, 3, 3, 2]
    assert first_fit(lengths, 6) == [[0], [1, 2], [3]]
    assert sorted(totals(lengths, spread(lengths, 6, 4))) == [2, 3, 3, 5]


def test_where_even_micro_batches_exceed_the_limit_first_fit_decides():
    """Adding the longest to the lightest gives 4+3 and 4+3, and 7 exceeds the limit; first fit puts 3+3 together."""
    lengths = [4, 4, 3, 3]
    assert totals(lengths, spread(lengths, 6, 3)) == [6, 4, 4]


def gsm8k_lengths(seed, count):
    """Draw lengths like those of GSM8K's questions with answers: log-normal, 143 +- 59 tokens."""
    draw = random.Random(seed)
    return [max(1, round(math.exp(draw.gauss(4.885, 0.4)))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_little_space_is_left_over(seed):
    """Ranks run in step and memory fits the largest micro batch: the cost is the number of them times the largest.

    Dynamic micro batches may use as much memory as micro batches of four sequences do.
    """
    ranks = [gsm8k_lengths(seed * 2 + rank, 512) for rank in range(2)]
    real = sum(map(sum, ranks))
    fixed = [sum(rank[at : at + 4]) for rank in ranks for at in range(0, len(rank), 4)]
    limit = max(fixed)
    number = max(len(first_fit(rank, limit)) for rank in ranks)
    dynamic = [total for rank in ranks for total in totals(rank, spread(rank, limit, number))]
    assert max(dynamic) <= limit and len(dynamic) < 0.7 * len(fixed)
    assert len(fixed) * max(fixed) / real >= 1.6
    assert len(dynamic) * max(dynamic) / real <= 1.05
