"""A checkpoint to read from: for every HF tensor, its slices and their positions in files."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.regions import Region
from post_training.layouts.layout import Slice


@dataclass(frozen=True, slots=True)
class Fragment:
    """One slice of an HF tensor in one file; `holder` names it in messages."""

    bounds: Slice
    region: Region
    holder: str


@dataclass
class HFTensor:
    """A tensor by its HF name.

    Attributes:
        shape: of the whole tensor.
        fragments: all fragments, including replicas.
    """

    name: str
    shape: tuple[int, ...]
    fragments: list[Fragment] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.fragments[0].region.dtype

    @cached_property
    def distinct(self) -> list[Fragment]:
        """One fragment for each slice."""
        return list({fragment.bounds: fragment for fragment in reversed(self.fragments)}.values())

    def check(self) -> None:
        """Raise CheckpointError unless the fragments have one type and their slices cover the tensor once."""
        if not self.fragments:
            raise CheckpointError(f"tensor {self.name} is missing: no file has any part of it")
        for fragment in self.fragments:
            if fragment.region.dtype != self.dtype:
                raise CheckpointError(
                    f"tensor {self.name}: {fragment.region.dtype} in {fragment.holder}, "
                    f"{self.dtype} in {self.fragments[0].holder}"
                )
        covered = sum(volume(fragment.bounds) for fragment in self.distinct)
        whole = torch.Size(self.shape).numel()
        if covered != whole:
            raise CheckpointError(f"tensor {self.name}: the files have {covered} of its {whole} elements")


class Source:
    """The HF tensors of one checkpoint.

    Args:
        name: of the checkpoint, for messages.
        tensors: the stored tensors.
        aliases: tensors that are not stored because they equal another one, with that one's name.
    """

    def __init__(self, name: str, tensors: Iterable[HFTensor], aliases: dict[str, str] | None = None) -> None:
        self.name = name
        self.tensors = {tensor.name: tensor for tensor in tensors}
        for alias, original in (aliases or {}).items():
            self.tensors.setdefault(alias, self.tensors[original])
        for tensor in self.tensors.values():
            tensor.check()

    def dtype(self, hf_name: str) -> torch.dtype:
        return self.tensors[hf_name].dtype

    def read_into(self, hf_name: str, bounds: Slice, out: torch.Tensor) -> None:
        """Fill `out`, of the slice's extents and the tensor's dtype, from all files that hold parts of the slice."""
        for fragment in self.tensors[hf_name].distinct:
            common = intersection(fragment.bounds, bounds)
            if common:
                target = out[tuple(slice(*interval) for interval in relative(common, bounds))]
                fragment.region.part(relative(common, fragment.bounds)).read_into(target)


def volume(bounds: Slice) -> int:
    return torch.Size(stop - start for start, stop in bounds).numel()


def intersection(left: Slice, right: Slice) -> Slice | None:
    """Return the slice that two slices share, None if they do not overlap."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(bounds: Slice, origin: Slice) -> Slice:
    """Return `bounds` in coordinates that start at the corner of `origin`."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(bounds, origin, strict=True))
