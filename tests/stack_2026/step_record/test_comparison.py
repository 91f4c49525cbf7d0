"""The comparison of a recorded step with its replay matches a naive one, value by value, in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_plugin.step_record.comparison import compare_metrics, compare_rows

NAN, INF = math.nan, math.inf
VALUES = st.sampled_from([0.0, 0.5, 0.75, -3.0, NAN, INF, -INF])
TOLERANCE = 0.25


def naive(one: float, other: float) -> tuple[bool, float]:
    """Return whether two values differ, and by how much if both are finite."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) > TOLERANCE, abs(one - other)
    return not (one == other or (math.isnan(one) and math.isnan(other))), 0.0


@given(st.lists(st.lists(st.tuples(VALUES, VALUES), max_size=4), max_size=4))
def test_rows_are_counted_value_by_value(drawn):
    keys = [f"sample{place}" for place in range(len(drawn))]
    rows = [[torch.tensor([pair[side] for pair in row]) for row in drawn] for side in range(2)]
    found = compare_rows("ref", "log-probs", keys, *rows, TOLERANCE)
    pairs = [naive(*pair) for row in drawn for pair in row]
    assert (found.stage, found.what, found.count) == ("ref", "log-probs", len(pairs))
    assert found.apart == sum(apart for apart, _ in pairs)
    # A row with a value that is finite on one side only is named for that.
    lost = [any(math.isfinite(one) != math.isfinite(other) or (naive(one, other)[0] and not math.isfinite(one))
                for one, other in row) for row in drawn]  # fmt: skip
    whole = [naive(*pair)[1] for row, gone in zip(drawn, lost, strict=True) if not gone for pair in row]
    assert found.most == max(whole, default=0.0)
    if any(lost):
        assert found.where.startswith(f"sample {keys[lost.index(True)]}, token ") and "not finite" in found.where


def test_largest_difference_is_named_with_its_sample_and_token():
    recorded = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7])]
    again = [torch.tensor([1.0, 2.5]), torch.tensor([1.0, 0.5, 3.25]), torch.tensor([8.0])]
    found = compare_rows("mask", "mask", ["a", "b", "c"], recorded, again, 0.25)
    assert (found.count, found.apart, found.most, found.where) == (6, 3, 1.5, "sample b, token 1")


def test_samples_of_another_length_are_apart_whole():
    found = compare_rows("mask", "mask", ["a", "b"], [torch.ones(3), torch.ones(2)], [torch.ones(2), torch.ones(2)], 1)
    assert (found.count, found.apart, found.where) == (5, 3, "sample a, its length")


@pytest.mark.parametrize(
    ("recorded", "again", "apart"),
    [
        (100.0, 100.9, 0), (100.0, 101.1, 1), (-100.0, -99.1, 0), (0.01, 0.019, 0), (0.01, 0.021, 1), (0.0, 0.0, 0),
        (NAN, NAN, 0), (INF, INF, 0), (NAN, 1.0, 1), (1.0, INF, 1), (INF, -INF, 1), (1.0, 1.009, 0), (1.0, 1.011, 1),
    ],
)  # fmt: skip
def test_metrics_are_apart_by_a_share_of_large_ones(recorded, again, apart):
    """The tolerance is 1 % of values above 1, and 0.01 for smaller ones."""
    (found,) = compare_metrics("update", {"norm": recorded, "other": 1.0}, {"norm": again}, 0.01, ["norm"])
    assert (found.what, found.count, found.apart) == ("norm", 1, apart)
