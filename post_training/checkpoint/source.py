"""A checkpoint as it is read: for every canonical tensor, who holds which box of it, and where in which file."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.regions import Region
from post_training.layouts.layout import Box


@dataclass(frozen=True, slots=True)
class Fragment:
    """One box of a canonical tensor in one file; `holder` names it in messages."""

    box: Box
    region: Region
    holder: str


@dataclass
class CanonicalTensor:
    """A tensor by its HuggingFace name.

    shape: of the whole tensor.
    fragments: all of them, replicas too.
    """

    name: str
    shape: tuple[int, ...]
    fragments: list[Fragment] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.fragments[0].region.dtype

    @cached_property
    def distinct(self) -> list[Fragment]:
        """One fragment for each box."""
        return list({fragment.box: fragment for fragment in reversed(self.fragments)}.values())

    def check(self) -> None:
        """Raise CheckpointError unless the fragments have one type and their boxes cover the tensor once."""
        if not self.fragments:
            raise CheckpointError(f"tensor {self.name} is missing: no file has any part of it")
        for fragment in self.fragments:
            if fragment.region.dtype != self.dtype:
                raise CheckpointError(
                    f"tensor {self.name}: {fragment.region.dtype} in {fragment.holder}, "
                    f"{self.dtype} in {self.fragments[0].holder}"
                )
        covered = sum(volume(fragment.box) for fragment in self.distinct)
        whole = torch.Size(self.shape).numel()
        if covered != whole:
            raise CheckpointError(f"tensor {self.name}: the files hold {covered} of its {whole} elements")


class Source:
    """The canonical tensors of one checkpoint.

    aliases: tensors that are not stored because they equal another one.
    """

    def __init__(self, name: str, tensors: Iterable[CanonicalTensor], aliases: dict[str, str] | None = None) -> None:
        self.name = name
        self.tensors = {tensor.name: tensor for tensor in tensors}
        for alias, original in (aliases or {}).items():
            self.tensors.setdefault(alias, self.tensors[original])
        for tensor in self.tensors.values():
            tensor.check()

    def dtype(self, canonical: str) -> torch.dtype:
        return self.tensors[canonical].dtype

    def read_into(self, canonical: str, box: Box, out: torch.Tensor) -> None:
        """Fill `out`, of the box's extents and the tensor's dtype, from whatever files hold parts of the box."""
        for fragment in self.tensors[canonical].distinct:
            common = intersection(fragment.box, box)
            if common:
                target = out[tuple(slice(*interval) for interval in relative(common, box))]
                fragment.region.part(relative(common, fragment.box)).read_into(target)


def volume(box: Box) -> int:
    return torch.Size(stop - start for start, stop in box).numel()


def intersection(left: Box, right: Box) -> Box | None:
    """The box that two boxes share, None if there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Box) -> Box:
    """`box` in coordinates that start at the corner of `origin`."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))
