"""Types for values on a command line, for argparse: numbers that are finite and in their range, and paths."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

# Longer numbers make no sense here, and Python refuses to convert several thousand digits.
_LONGEST, _DIGITS = 40, 9


def finite(lowest: float = -math.inf, highest: float = math.inf, above: float | None = None) -> Callable[[str], float]:
    """Return a type for a finite number of at least `lowest` and at most `highest`, or greater than `above`."""

    def convert(text: str) -> float:
        try:
            value = float(text) if len(text) <= _LONGEST else math.nan
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and lowest <= value <= highest and (above is None or value > above)):
            raise ArgumentTypeError(f"{text[:_LONGEST]!r} is invalid. Set it to {_range(lowest, highest, above)}")
        return value

    convert.__name__ = "number"
    return convert


def whole(lowest: int) -> Callable[[str], int]:
    """Return a type for a whole number of at least `lowest` with at most 9 digits."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text) >= lowest):
            raise ArgumentTypeError(f"{text[:_LONGEST]!r} is invalid. Set it to a whole number from {lowest}")
        return int(text)

    convert.__name__ = "whole number"
    return convert


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path with links followed as far as they resolve; a link to itself stays as it is."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def _range(lowest: float, highest: float, above: float | None) -> str:
    if above is not None:
        least = f"a number above {above:g}, up" if highest < math.inf else f"a number above {above:g}"
    else:
        least = "a number" if lowest == -math.inf else f"a number from {lowest:g}"
    return least if highest == math.inf else f"{least} to {highest:.12g}"
