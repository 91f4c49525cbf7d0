"""Compares the replayed results of a stage with the recorded ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

STAGES = ("mask", "ref", "old_log_prob", "advantages", "update")
"""Stages of a step, in the order in which they are replayed."""


@dataclass(frozen=True)
class Compared:
    """Comparison of a recorded quantity with its replay.

    Attributes:
        stage: of the step.
        what: name of the quantity.
        count: number of values.
        apart: number of values that differ by more than the tolerance, or are finite on one side only.
        most: largest difference of two finite values.
        where: place of the largest difference, or of the first value that is not finite and differs.
    """

    stage: str
    what: str
    count: int
    apart: int
    most: float
    where: str

    def line(self) -> str:
        """Return a line of the table whose header is `HEADER`."""
        at = f"  {self.where}" if self.most or self.apart else ""
        return f"  {self.stage:14}{self.what:34}{self.count:9,}{self.apart:9,}{self.most:11.1e}{at}"


HEADER = f"  {'stage':14}{'compared':34}{'values':>9}{'apart':>9}{'most':>11}  where"


def compare_rows(
    stage: str, what: str, keys: Sequence[str], recorded: Sequence[Any], again: Sequence[Any], tolerance: float
) -> Compared:
    """Compare one vector of token values per sample.

    Args:
        stage: of the step.
        what: name of the quantity.
        keys: names of the samples.
        recorded: for each sample [tokens], any type.
        again: the same, replayed.
        tolerance: largest absolute difference that counts as equal.
    """
    count = apart = 0
    most, where, half = 0.0, "", ""
    for key, one, other in zip(keys, recorded, again, strict=True):
        one, other = one.double().flatten(), other.double().flatten()
        if one.shape != other.shape:
            count, apart, half = count + len(one), apart + len(one), half or f"sample {key}, its length"
            continue
        both = one.isfinite() & other.isfinite()
        # Equal infinities, and two NaNs, count as the same.
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
    """Compare metrics of a step. The tolerance is relative above 1 and absolute below; both sides have `names`."""
    found = []
    for name in names:
        one, other = float(recorded[name]), float(again[name])
        same = one == other or (math.isnan(one) and math.isnan(other))
        finite = math.isfinite(one) and math.isfinite(other)
        difference = abs(one - other) if finite else 0.0
        apart = not same and (not finite or difference > tolerance * max(1.0, abs(one)))
        found.append(
            Compared(stage, name, 1, int(apart), difference, f"{one:.8g} was recorded, {other:.8g} recomputed")
        )
    return found
