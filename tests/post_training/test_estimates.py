"""Estimates match exhaustive counts, and intervals contain the true value as often as they should."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from post_training import estimates
from post_training.estimates import block_bootstrap, bootstrap, pass_at_k, wilson


def counted(samples: int, correct: int, k: int) -> float:
    """Return the share of all choices of k answers that contain a correct one."""
    answers = [True] * correct + [False] * (samples - correct)
    chosen = list(combinations(answers, k))
    return sum(map(any, chosen)) / len(chosen)


@given(st.integers(1, 10).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices(drawn):
    assert pass_at_k(*drawn) == pytest.approx(counted(*drawn), abs=1e-12)


def test_the_plug_in_estimate_is_another_number():
    """Control: 1 - (1 - c/n)^k, which the paper calls biased, fails the comparison above."""
    assert 1 - (1 - 1 / 4) ** 2 != pytest.approx(counted(4, 1, 2))
    assert pass_at_k(4, 1, 2) == 0.5 and pass_at_k(200, 3, 1) == pytest.approx(3 / 200)


@pytest.mark.parametrize("wrong", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_invalid_estimate_rejected(wrong):
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(*wrong)


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_the_published_interval(right, trials, low, high):
    found = wilson(right, trials)
    assert (found.value, found.low, found.high) == pytest.approx((right / trials, low, high), abs=5e-5)


def test_wilson_has_a_width_where_all_are_alike_and_holds_the_share():
    for right in (0, 7):
        found = wilson(right, 7)
        assert found.low <= right / 7 <= found.high and found.high - found.low > 0.3
    for wrong in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="not a proportion"):
            wilson(*wrong)


def test_the_bootstrap_holds_the_true_mean_about_as_often_as_it_says():
    drawn = np.random.default_rng(5)
    held = 0
    for seed in range(200):
        found = bootstrap(list(drawn.beta(2, 3, 60)), seed)
        held += found.low <= 0.4 <= found.high
    assert 180 <= held <= 198  # 95% of 200 are 190


def test_the_bootstrap_takes_problems_and_not_answers():
    """Eight equal answers to a problem are one draw; an interval over answers would be too narrow."""
    problems = [float(index % 2) for index in range(40)]
    over_problems, over_answers = bootstrap(problems), bootstrap([each for each in problems for _ in range(8)])
    assert over_problems.high - over_problems.low > 2 * (over_answers.high - over_answers.low)
    assert bootstrap(problems) == bootstrap(problems) and bootstrap([0.5, 0.5]).low == 0.5
    with pytest.raises(ValueError, match="at least one problem"):
        bootstrap([])


@pytest.mark.parametrize(("block", "blocks"), [(1, 11), (3, 4)])
def test_the_bootstrap_is_two_thousand_draws_whatever_is_drawn_at_once(monkeypatch, block, blocks):
    """Each draw has as many values as the series; the last block is truncated if blocks do not fill it."""
    values = list(np.random.default_rng(3).normal(size=11))
    drawn = np.random.default_rng(9).integers(0, 11, (2000, blocks))
    resampled = ([values[(start + place) % 11] for start in draw for place in range(block)][:11] for draw in drawn)
    low, high = np.quantile([np.mean(each) for each in resampled], [0.025, 0.975])
    found = block_bootstrap(values, 9, block)
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(values), low, high), abs=1e-12)
    for at_once in (1, 11 * 7, 11 * 1999):
        monkeypatch.setattr(estimates, "_RESAMPLED_AT_ONCE", at_once)
        assert block_bootstrap(values, 9, block) == found


def circular_deviation(values: np.ndarray, block: int) -> float:
    """Return the standard deviation of the mean of circular blocks that fill the series.

    Politis and Romano, "A Circular Block-Resampling Procedure for Stationary Data", 1992: circular autocovariances,
    weighted by 1 - lag / block.
    """
    off = values - values.mean()
    covariances = [float(off @ np.roll(off, lag)) / len(off) for lag in range(block)]
    weighted = sum((1 - lag / block) * covariance for lag, covariance in enumerate(covariances[1:], 1))
    return math.sqrt((covariances[0] + 2 * weighted) / len(off))


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("rising", [1.0, -3.0])
def test_circular_blocks_have_published_mean_and_deviation(rising, block):
    """A block that starts near the end continues with the first steps, which differ most if a run learns."""
    values = np.linspace(0, rising, 64) + 0.1 * np.random.default_rng(4).normal(size=64)
    found, deviation = block_bootstrap(values.tolist(), 2, block), circular_deviation(values, block)
    assert found.value == pytest.approx(values.mean())
    # With 2,000 draws the middle of the interval is exact to some hundredths of a deviation.
    assert (found.low + found.high) / 2 == pytest.approx(values.mean(), abs=0.15 * deviation)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(deviation, rel=0.05)


def test_block_length_is_cube_root_of_number_of_values():
    values = np.random.default_rng(6).normal(size=60).tolist()
    assert block_bootstrap(values) == block_bootstrap(values, block=4) != block_bootstrap(values, block=3)


def test_an_estimate_is_shown_with_three_digits():
    assert str(estimates.Estimate(1 / 3, 0.0616, -0.5)) == "0.333 [0.062, -0.500]"
