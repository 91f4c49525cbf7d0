"""Estimates of how well a model answers, with 95% confidence intervals.

Intervals are taken over problems, because these are the random draws: several answers to one problem are not
independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 2000
_RESAMPLED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the chance that one of `k` answers or more is right, from `correct` of `samples` answers.

    1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374,
    equation 1. With 1 of 4 answers right and k = 2: 1 - C(3, 2) / C(4, 2) = 1 - 3/6 = 0.5.

    Raises:
        ValueError: not 0 <= correct <= samples, or not 1 <= k <= samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {correct} correct of {samples} answers")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson(right: int, trials: int) -> Estimate:
    """Estimate a share of independent trials with Wilson's score interval.

    Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927. The interval stays within 0
    and 1, and has a width even if all or none of the trials are right.

    Raises:
        ValueError: no trials, or not 0 <= right <= trials.
    """
    if trials < 1 or not 0 <= right <= trials:
        raise ValueError(f"{right} of {trials} is not a proportion")
    z, share = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), right / trials
    scale = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Estimate(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """Estimate the mean of one value per problem with the percentile interval of the bootstrap over problems.

    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13. If all values are equal, the interval
    has no width, because resampling draws only observed values.

    Raises:
        ValueError: no values.
    """
    return block_bootstrap(values, seed, block=1)


def block_bootstrap(values: Sequence[float], seed: int = 0, block: int | None = None) -> Estimate:
    """Estimate the mean of ordered values, such as those of a run's steps, whose neighbours are not independent.

    The interval draws blocks of neighbouring values: Künsch, "The Jackknife and the Bootstrap for General Stationary
    Observations", Annals of Statistics 17, 1989. Blocks wrap around the end, so all values are drawn equally often.

    Args:
        block: values of a block; by default the cube root of the number of values, rounded up.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("at least one problem is needed for an estimate")
    drawn, each = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    length = block or math.ceil(len(each) ** (1 / 3))
    blocks = math.ceil(len(each) / length)
    at_once = max(1, _RESAMPLED_AT_ONCE // len(each))
    means = []
    for begun in range(0, _RESAMPLES, at_once):
        starts = drawn.integers(0, len(each), (min(at_once, _RESAMPLES - begun), blocks))
        places = (starts[:, :, None] + np.arange(length)) % len(each)
        means.append(each[places.reshape(len(starts), -1)[:, : len(each)]].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(each.mean()), float(low), float(high))
