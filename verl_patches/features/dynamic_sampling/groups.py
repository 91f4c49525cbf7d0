"""The rule by which groups of answers qualify for training."""

from __future__ import annotations

import math
from collections.abc import Sequence


def qualifies(values: Sequence[float], lower: float | None = None, upper: float | None = None) -> bool:
    """Return whether the answers to one prompt qualify: with equal values, every answer's advantage would be 0.

    Args:
        values: the metric of each answer. A single answer always qualifies, as in verl's recipe; a value that is not
            finite disqualifies its group.
        lower: inclusive lower bound of the mean; None for no bound.
        upper: inclusive upper bound of the mean; None for no bound.

    >>> [qualifies(each) for each in ([1, 1], [0, 1], [0], [0, math.nan])]
    [False, True, True, False]
    >>> qualifies([0, 0, 0, 1], lower=0.3)
    False
    """
    if not all(math.isfinite(value) for value in values):
        return False
    if len(values) > 1 and min(values) == max(values):
        return False
    mean = math.fsum(values) / len(values)
    return (lower is None or lower <= mean) and (upper is None or mean <= upper)
