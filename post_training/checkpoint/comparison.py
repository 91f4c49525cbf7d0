"""Compares two checkpoints of any form bit for bit, tensor by tensor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from post_training.checkpoint.source import Fragment, HFTensor, Source, intersection, relative
from post_training.checkpoint.workers import ProgressBar, run_tasks
from post_training.layouts.layout import Slice

_SLAB_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Difference:
    """The first difference of a tensor in two files: an element, in row order, or type and shape."""

    tensor: str
    text: str

    def __str__(self) -> str:
        return f"{self.tensor}: {self.text}"


def first_difference(
    left: Source, right: Source, names: list[str], workers: int, bar: ProgressBar
) -> Difference | None:
    """Return the difference of the first of these tensors that is unequal, None if all are equal.

    Every replica is read, so a checkpoint whose ranks disagree differs from every other one.
    """
    differences: dict[int, Difference | None] = {}
    tasks = run_tasks(
        lambda index, progress: _difference(left, right, names[index], progress), range(len(names)), workers, bar
    )
    try:
        for index, difference in tasks:
            differences[index] = difference
            found = min((index for index, difference in differences.items() if difference), default=None)
            if found is not None and all(earlier in differences for earlier in range(found)):
                return differences[found]
    finally:
        tasks.close()
    return None


def compared_bytes(left: Source, right: Source, names: list[str]) -> int:
    """Return the bytes that `first_difference` compares if there is no difference, for a progress bar."""
    return sum(
        sum(_bytes(fragment, left.tensors[name]) for fragment in left.tensors[name].fragments)
        + sum(_bytes(fragment, right.tensors[name]) for fragment in _replicas(right.tensors[name]))
        for name in names
    )


def _bytes(fragment: Fragment, tensor: HFTensor) -> int:
    return torch.Size(stop - start for start, stop in fragment.bounds).numel() * tensor.dtype.itemsize


def _replicas(tensor: HFTensor) -> list[Fragment]:
    """Return the fragments that are not in `distinct`."""
    distinct = {id(fragment) for fragment in tensor.distinct}
    return [fragment for fragment in tensor.fragments if id(fragment) not in distinct]


def _difference(left: Source, right: Source, name: str, progress: Callable[[int], None]) -> Difference | None:
    mine, other = left.tensors[name], right.tensors[name]
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return Difference(
            name, f"{mine.dtype} {mine.shape} in {left.name}, {other.dtype} {other.shape} in {right.name}"
        )
    pairs = [(a, b) for a in mine.fragments for b in other.distinct]
    pairs += [(a, b) for a in mine.distinct for b in _replicas(other)]
    found = [unequal for a, b in pairs if (unequal := _first_unequal(a, b, progress))]
    if not found:
        return None
    index, values, holders = min(found)
    position = ", ".join(map(str, index))
    return Difference(name, f"[{position}] is {values[0]!r} in {holders[0]} and {values[1]!r} in {holders[1]}")


Unequal = tuple[tuple[int, ...], tuple[float, float], tuple[str, str]]


def _first_unequal(left: Fragment, right: Fragment, progress: Callable[[int], None]) -> Unequal | None:
    """Return index in the whole tensor, both values and both holders of the first element that differs."""
    common = intersection(left.bounds, right.bounds)
    if common is None:
        return None
    for bounds in _slabs(common):
        values = [_read(fragment, bounds) for fragment in (left, right)]
        bits = [value.view(torch.uint8).reshape(value.numel(), value.dtype.itemsize) for value in values]
        progress(bits[0].numel())
        if torch.equal(*bits):
            continue
        element = int((bits[0] != bits[1]).any(dim=1).nonzero()[0])
        columns = values[0].shape[1]
        position = (element // columns, element % columns)[-len(bounds) :]
        index = tuple(start + step for (start, _), step in zip(bounds, position, strict=True))
        shown = [float(value.flatten()[element]) for value in values]
        return index, (shown[0], shown[1]), (left.holder, right.holder)
    return None


def _read(fragment: Fragment, bounds: Slice) -> torch.Tensor:
    return fragment.region.part(relative(bounds, fragment.bounds)).read()


def _slabs(bounds: Slice) -> Iterator[Slice]:
    """Divide a slice along its first dimension."""
    (first, last), *rest = bounds
    step = max(_SLAB_ELEMENTS // max(torch.Size(stop - start for start, stop in rest).numel(), 1), 1)
    for start in range(first, last, step):
        yield ((start, min(start + step, last)), *rest)
