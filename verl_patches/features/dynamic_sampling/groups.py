"""Which groups of answers qualify for training."""

from __future__ import annotations

import math
from collections.abc import Sequence


def qualifies(values: Sequence[float], lower: float | None = None, upper: float | None = None) -> bool:
    """Whether the answers to one prompt are worth training on: equal values give every answer the advantage 0.

    values: the metric of each answer. One answer alone always differs enough, as in verl's recipe; a value that is not
    finite spoils its group. lower, upper: bounds of the mean, inclusive; None is no bound.

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
