"""Finds the slices of HuggingFace tensors in a stretch of a local tensor's memory.

Megatron's distributed optimizer cuts a rank's parameters into stretches without regard to rows: a data-parallel rank
may own the elements 5 to 17 of a matrix with 4 columns. In the HF tensor these are the end of row 1, the rows 2 and 3,
and the beginning of row 4: at most three slices for every shard that the stretch touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from post_training.checkpoint.regions import Area
from post_training.layouts.layout import Shard, Slice


@dataclass(frozen=True, slots=True)
class FlatPart:
    """A slice of an HF tensor inside a stretch of memory.

    Attributes:
        hf_name: the HF tensor; PADDING for memory that belongs to none.
        bounds: the slice of that tensor.
        area: the same elements in memory, counted from the beginning of the stretch.
    """

    hf_name: str
    bounds: Slice
    area: Area

    def of(self, stretch: torch.Tensor) -> torch.Tensor:
        """Return the live elements of the slice in the vector `stretch`, with the shape of the slice."""
        area = self.area
        found = stretch.as_strided(
            (area.rows, area.columns), (area.row_stride, 1), stretch.storage_offset() + area.start
        )
        if len(self.bounds) == 1:
            return found.squeeze(0)
        return found.t() if area.transposed else found


def flat_parts(shape: tuple[int, ...], shard: Shard, start: int, stop: int) -> Iterator[FlatPart]:
    """Yield the parts of `shard` in the elements `start` to `stop` of its local tensor, which has this shape.

    Raises:
        ValueError: the shard does not fit the shape.
    """
    whole = Area.of(shape, shard.view)
    for (top, bottom), (left, right) in _rectangles(whole, start, stop):
        bounds = ((top, bottom), (left, right))
        if whole.transposed:
            bounds = bounds[::-1]
        inside = bounds[-1:] if len(shard.bounds) == 1 else bounds
        of_tensor = tuple(
            (first + low, first + high) for (first, _), (low, high) in zip(shard.bounds, inside, strict=True)
        )
        area = Area(
            whole.start + top * whole.row_stride + left - start,
            bottom - top,
            right - left,
            whole.row_stride,
            whole.transposed,
        )
        yield FlatPart(shard.hf_name, of_tensor, area)


def _rectangles(area: Area, start: int, stop: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield intervals of rows and columns of `area` between the elements `start` and `stop` of the whole tensor."""

    def columns(row: int) -> tuple[int, int]:
        first = area.start + row * area.row_stride
        return max(0, start - first), min(area.columns, stop - first)

    def beside(row: int) -> bool:
        return columns(row)[0] >= columns(row)[1]

    top, bottom = _touched(area, start, stop)
    while top < bottom and beside(top):
        top += 1
    while top < bottom and beside(bottom - 1):
        bottom -= 1
    if top == bottom:
        return
    if columns(top) != (0, area.columns):
        yield (top, top + 1), columns(top)
        top += 1
    if top < bottom and columns(bottom - 1) != (0, area.columns):
        bottom -= 1
        last = ((bottom, bottom + 1), columns(bottom))
    else:
        last = None
    if top < bottom:
        yield (top, bottom), (0, area.columns)
    if last:
        yield last


def _touched(area: Area, start: int, stop: int) -> tuple[int, int]:
    """Return the interval of rows that the elements `start` to `stop` touch, with at most one more at each end."""
    stride = max(area.row_stride, 1)
    top = min(max(0, (start - area.start - area.columns) // stride), area.rows)
    return top, max(top, min(area.rows, (stop - area.start) // stride + 1))
