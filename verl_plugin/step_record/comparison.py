"""Compares what a stage computed again with what was recorded of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

STAGES = ("mask", "ref", "old_log_prob", "advantages", "update")
"""In the order in which a step is made again."""


@dataclass(frozen=True)
class Compared:
    """A quantity of a stage, recorded and made again.

    Attributes:
        stage: of the step.
        what: the quantity.
        count: how many values.
        apart: how many of them differ by more than the tolerance, or are finite on one side alone.
        most: the largest difference of two finite values.
        where: of the largest difference, or of the first value that is finite on one side alone.
    """

    stage: str
    what: str
    count: int
    apart: int
    most: float
    where: str

    def line(self) -> str:
        """For a table."""
        at = f"  {self.where}" if self.most or self.apart else ""
        return f"  {self.stage:14}{self.what:34}{self.count:9,}{self.apart:9,}{self.most:11.1e}{at}"


HEADER = f"  {'stage':14}{'compared':34}{'values':>9}{'apart':>9}{'most':>11}  where"


def compare_rows(
    stage: str, what: str, keys: Sequence[str], recorded: Sequence[Any], again: Sequence[Any], tolerance: float
) -> Compared:
    """Of each sample a vector of tokens.

    Args:
        stage: of the step.
        what: the quantity.
        keys: names of the samples.
        recorded: of each sample [tokens], any type.
        again: the same, made again.
        tolerance: an absolute one.
    """
    count = apart = 0
    most, where, half = 0.0, "", ""
    for key, one, other in zip(keys, recorded, again, strict=True):
        one, other = one.double().flatten(), other.double().flatten()
        if one.shape != other.shape:
            count, apart, half = count + len(one), apart + len(one), half or f"sample {key}, its length"
            continue
        both = one.isfinite() & other.isfinite()
        # Not finite on both sides is the same where it is the same.
        lost = ~both & ~((one == other) | (one.isnan() & other.isnan()))
        difference = torch.where(both, (one - other).abs(), torch.zeros_like(one))
        count, apart = count + len(one), apart + int((lost | (difference > tolerance)).sum())
        if lost.any():
            half = half or f"sample {key}, token {int(lost.nonzero()[0])}, not finite"
        elif len(one) and float(difference.max()) > most:
            most, where = float(difference.max()), f"sample {key}, token {int(difference.argmax())}"
    return Compared(stage, what, count, apart, most, half or where)


def compare_metrics(
    stage: str, recorded: Mapping[str, Any], again: Mapping[str, Any], tolerance: float, names: Iterable[str]
) -> list[Compared]:
    """Metrics of a step; the tolerance is relative above 1 and absolute below. Both sides have `names`."""
    found = []
    for name in names:
        one, other = float(recorded[name]), float(again[name])
        same = one == other or (math.isnan(one) and math.isnan(other))
        finite = math.isfinite(one) and math.isfinite(other)
        difference = abs(one - other) if finite else 0.0
        apart = not same and (not finite or difference > tolerance * max(1.0, abs(one)))
        found.append(Compared(stage, name, 1, int(apart), difference, f"{one:.8g} was recorded, {other:.8g} again"))
    return found
