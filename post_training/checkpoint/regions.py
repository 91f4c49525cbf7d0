"""Reads rectangles inside files with `pread` into buffers of bounded size.

Files are not mapped into memory: mapped pages count as the process's own, so its peak would grow with the file.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.fp8 import dequantise, scale_slice
from post_training.layouts.layout import WHOLE, LocalView, Slice

SLAB_BYTES = 4 << 20
"""Bytes read at a time."""

PAGE_BYTES = 4096
"""Smallest unit that a disk reads. Shorter gaps between rows are read with the rows and dropped."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor inside a file; `offset` in bytes."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle of a contiguous tensor's memory, in elements; a vector is one row.

    `transposed` is true if the stored matrix is the transpose of the layout's.
    """

    start: int
    rows: int
    columns: int
    row_stride: int
    transposed: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], view: LocalView) -> "Area":
        """Return the area of `view` in a tensor of this shape. Raises ValueError if it does not fit."""
        try:
            found = view.of(torch.empty(shape, dtype=torch.uint8, device="meta"))
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"a tensor of shape {shape} does not fit its layout ({error})") from error
        if view.transposed:
            found = found.t()
        if found.dim() == 1:
            found = found.unsqueeze(0)
        elif found.dim() > 2:  # contiguous, and sharded as a matrix
            found = found.flatten(1)
        rows, columns = found.shape
        return cls(found.storage_offset(), rows, columns, found.stride(0), view.transposed)

    @property
    def stop(self) -> int:
        return self.start + (self.rows - 1) * self.row_stride + self.columns

    @property
    def contiguous(self) -> bool:
        return self.rows == 1 or self.row_stride == self.columns

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns in the orientation of the layout."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def part(self, bounds: Slice) -> "Area":
        """Return the area of a slice that is relative to this area, in the orientation of the layout."""
        intervals = ((0, 1), *bounds) if len(bounds) == 1 else bounds
        (top, bottom), (left, right) = reversed(intervals) if self.transposed else intervals
        start = self.start + top * self.row_stride + left
        return replace(self, start=start, rows=bottom - top, columns=right - left)

    def slabs(self, itemsize: int, slab_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield intervals of rows whose memory, including gaps between rows, is at most `slab_bytes` (or one row)."""
        height = max(slab_bytes // max(self.row_stride * itemsize, 1), 1)
        for top in range(0, self.rows, height):
            yield top, min(top + height, self.rows)


@dataclass(frozen=True, slots=True)
class Region:
    """An area of a stored tensor; with `scales` it is FP8 and is read as bfloat16.

    Attributes:
        origin: position of the region in the whole FP8 weight, which determines the block of every element.
        name: of an FP8 weight, for messages.
    """

    tensor: StoredTensor
    area: Area
    scales: StoredTensor | None = None
    origin: tuple[int, int] = (0, 0)
    name: str = ""

    @classmethod
    def of(
        cls, tensor: StoredTensor, view: LocalView = WHOLE, scales: StoredTensor | None = None, name: str = ""
    ) -> "Region":
        return cls(tensor, Area.of(tensor.shape, view), scales, name=name)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which it is read."""
        return self.tensor.dtype if self.scales is None else torch.bfloat16

    def part(self, bounds: Slice) -> "Region":
        """Return a slice of this region, relative to it and in the orientation of the layout."""
        origin = self.origin
        if self.scales is not None:
            origin = (origin[0] + bounds[0][0], origin[1] + bounds[1][0])
        return replace(self, area=self.area.part(bounds), origin=origin)

    def read(self) -> torch.Tensor:
        """Return the region as a new tensor, [rows, columns] in the orientation of the layout."""
        out = torch.empty(self.area.extents, dtype=self.dtype)
        self.read_into(out)
        return out

    def read_into(self, out: torch.Tensor) -> None:
        """Fill `out`, [rows, columns] (or a vector) of this region's dtype and any strides.

        Raises CheckpointError if the file ends early or an FP8 weight cannot be dequantised.
        """
        if out.dim() == 1:
            out = out.unsqueeze(0)
        if out.dtype != self.dtype or tuple(out.shape) != self.area.extents:
            raise ValueError(f"{self.tensor.file}: {self.dtype} {self.area.extents} read into {out.dtype} {out.shape}")
        target = out.t() if self.area.transposed else out
        scales = None if self.scales is None else _read_whole(self.scales)
        with _opened(self.tensor.file) as descriptor:
            for top, bottom in self.area.slabs(self.tensor.dtype.itemsize, SLAB_BYTES):
                if scales is None:
                    self._copy_slab(descriptor, top, bottom, target[top:bottom])
                else:
                    self._dequantise_slab(descriptor, top, bottom, scales, target[top:bottom])

    def _copy_slab(self, descriptor: "_opened", top: int, bottom: int, target: torch.Tensor) -> None:
        if self.area.contiguous and target.is_contiguous():
            start = self.area.start + top * self.area.row_stride
            descriptor.read_into(target, self.tensor.offset + start * self.tensor.dtype.itemsize)
        else:
            place(self._stored_slab(descriptor, top, bottom), target)

    def _dequantise_slab(
        self, descriptor: "_opened", top: int, bottom: int, scales: torch.Tensor, target: torch.Tensor
    ) -> None:
        bounds = ((self.origin[0] + top, self.origin[0] + bottom), (self.origin[1], self.origin[1] + self.area.columns))
        (first, last), (left, right) = scale_slice(bounds)
        direct = target.stride(1) == 1
        values = target if direct else torch.empty(target.shape, dtype=torch.bfloat16)
        try:
            dequantise(self._stored_slab(descriptor, top, bottom), scales[first:last, left:right], bounds, values)
        except ValueError as error:
            rows = f"rows {bounds[0][0]} to {bounds[0][1] - 1}"
            raise CheckpointError(
                f"{self.tensor.file}: tensor {self.name}, {rows}: {error}. Download it again"
            ) from error
        if not direct:
            place(values, target)

    def _stored_slab(self, descriptor: "_opened", top: int, bottom: int) -> torch.Tensor:
        """Return rows as they are stored, [rows, columns], possibly as a view with gaps between them."""
        area, itemsize = self.area, self.tensor.dtype.itemsize
        if (area.row_stride - area.columns) * itemsize >= PAGE_BYTES:
            rows = torch.empty(bottom - top, area.columns, dtype=self.tensor.dtype)
            for row in range(top, bottom):
                descriptor.read_into(
                    rows[row - top], self.tensor.offset + (area.start + row * area.row_stride) * itemsize
                )
            return rows
        count = (bottom - top - 1) * area.row_stride + area.columns
        raw = torch.empty(count * itemsize, dtype=torch.uint8)
        descriptor.read_into(raw, self.tensor.offset + (area.start + top * area.row_stride) * itemsize)
        return raw.view(self.tensor.dtype).as_strided((bottom - top, area.columns), (area.row_stride, 1))


def place(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a matrix; into transposed memory in two steps, which torch does several times faster than in one."""
    if target.stride(0) == 1 and target.stride(1) != 1:
        turned = torch.empty(target.shape[::-1], dtype=target.dtype)
        turned.copy_(values.contiguous().t())
        target.t().copy_(turned)
    else:
        target.copy_(values)


def _read_whole(tensor: StoredTensor) -> torch.Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    with _opened(tensor.file) as descriptor:
        descriptor.read_into(out, tensor.offset)
    return out


class _opened:
    """A file open for reading at positions."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> "_opened":
        try:
            self.descriptor = os.open(self.file, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be opened ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read_into(self, tensor: torch.Tensor, offset: int) -> None:
        """Fill a contiguous tensor. Raises CheckpointError if the file ends before it is full."""
        buffer = memoryview(tensor.view(torch.uint8).numpy()).cast("B") if tensor.numel() else memoryview(b"")
        done = 0
        while done < len(buffer):
            count = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.file}: ends at byte {offset + done}, but {len(buffer) - done} more were expected"
                )
            done += count
