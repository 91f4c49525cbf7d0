"""Output tensors: streamed from a source shard by shard, never held whole."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from post_training.checkpoint.regions import Area
from post_training.checkpoint.source import Source
from post_training.layouts.layout import PADDING, Shard, Slice

WRITE_BYTES = 16 << 20
"""Bytes produced at a time if a shard is contiguous in memory. Interleaved shards are produced together."""


@dataclass(frozen=True)
class Record:
    """A tensor of an output file, and the shards that fill it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest buffer that `stream` needs."""
        return max((segment.stop - segment.start) * self.dtype.itemsize for segment in self.segments())

    def segments(self) -> Iterator["Segment"]:
        """Yield contiguous stretches of memory in order, each with the shards inside it.

        Raises:
            ValueError: the shards leave a gap or overlap.
        """
        position = 0
        for segment in _merged((Area.of(self.shape, shard.view), shard) for shard in self.shards):
            filled = sum(area.rows * area.columns for area, _ in segment.parts)
            if segment.start != position or filled != segment.stop - segment.start:
                raise ValueError(f"{self.name}: its layout leaves a gap or overlaps at element {position}")
            position = segment.stop
            yield from segment.split(self.dtype.itemsize)
        if position != torch.Size(self.shape).numel():
            raise ValueError(f"{self.name}: its layout ends at element {position} of {tuple(self.shape)}")

    def stream(self, source: Source) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order. A view is valid until the next one is requested."""
        for segment in self.segments():
            buffer = torch.empty(segment.stop - segment.start, dtype=self.dtype)
            for area, shard in segment.parts:
                target = buffer.as_strided((area.rows, area.columns), (area.row_stride, 1), area.start - segment.start)
                if shard.hf_name == PADDING:
                    target.zero_()
                    continue
                target = target.t() if area.transposed else target
                source.read_into(shard.hf_name, shard.bounds, target.squeeze(0) if len(shard.bounds) == 1 else target)
            yield memoryview(buffer.view(torch.uint8).numpy())


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of a record, filled by one shard or by several interleaved ones."""

    start: int
    stop: int
    parts: tuple[tuple[Area, Shard], ...]

    def split(self, itemsize: int) -> Iterator["Segment"]:
        """Divide a single contiguous shard into segments of rows; all other segments stay whole."""
        area, shard = self.parts[0]
        if len(self.parts) > 1 or area.transposed or len(shard.bounds) == 1 or not area.contiguous:
            yield self
            return
        for top, bottom in area.slabs(itemsize, WRITE_BYTES):
            rows = area.part(((top, bottom), (0, area.columns)))
            first = shard.bounds[0][0]
            bounds: Slice = ((first + top, first + bottom), shard.bounds[1])
            yield Segment(rows.start, rows.stop, ((rows, Shard(shard.hf_name, bounds, shard.local, shard.view)),))


def _merged(parts: Iterable[tuple[Area, Shard]]) -> Iterator[Segment]:
    """Merge areas whose stretches of memory overlap into segments."""
    waiting: list[tuple[Area, Shard]] = []
    stop = 0
    for area, shard in sorted(parts, key=lambda part: part[0].start):
        if waiting and area.start >= stop:
            yield Segment(waiting[0][0].start, stop, tuple(waiting))
            waiting = []
        waiting.append((area, shard))
        stop = max(stop, area.stop) if len(waiting) > 1 else area.stop
    if waiting:
        yield Segment(waiting[0][0].start, stop, tuple(waiting))
