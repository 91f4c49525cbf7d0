"""One-time agreement of a group's ranks before the first transfer, so that all continue or all stop."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from post_training.layouts.layout import PADDING, Shard
from post_training.reshard.exchange import Tensors
from post_training.reshard.overlaps import LayoutError, Layouts

Types = dict[str, torch.dtype]


@dataclass(frozen=True)
class OwnSide:
    """One side of this rank.

    Attributes:
        tensors: live tensors by local name.
        shards: of this rank.
        told: HF names whose types this rank reports to the others.
    """

    tensors: Tensors
    shards: Sequence[Shard]
    told: Collection[str]

    @classmethod
    def of(cls, tensors: Tensors, layouts: Layouts, rank: int) -> "OwnSide":
        """Make the side from the layouts of all ranks."""
        lower = {shard.hf_name for shards in layouts[:rank] for shard in shards}
        return cls(tensors, layouts[rank], {shard.hf_name for shard in layouts[rank]} - lower)


def agree_on_types(sides: Sequence[OwnSide], group: dist.ProcessGroup) -> list[Types]:
    """Return the type of every HF tensor, for each side. The first rank that holds a tensor reports its type.

    Two object collectives. Raises LayoutError on every rank if some rank's tensors do not fit its layout, or if two
    ranks hold one tensor in different types.
    """
    rank = dist.get_rank(group)
    problem, own = "", [Types() for _ in sides]
    try:
        own = [_types(side.tensors, side.shards) for side in sides]
    except (KeyError, ValueError) as error:
        problem = f"rank {rank}: {error.args[0]}"
    reports = [
        {name: kinds[name] for name in side.told if name in kinds} for kinds, side in zip(own, sides, strict=True)
    ]
    gathered = _gather((problem, reports), group)
    _raise_first(trouble for trouble, _ in gathered)
    agreed = [
        {name: kind for _, reported in gathered for name, kind in reported[side].items()} for side in range(len(sides))
    ]
    for kinds, common in zip(own, agreed, strict=True):
        for name, kind in kinds.items():
            if common[name] != kind:
                problem = f"{name}: rank {rank} has {kind}, but a lower rank {common[name]}"
    _raise_first(_gather(problem, group))
    return agreed


def agree_on_plan(digest: str, group: dist.ProcessGroup) -> None:
    """Raise LayoutError on every rank unless all ranks have the same plan digest. One object collective."""
    share_beside_plan(digest, None, group)


def share_beside_plan(digest: str, told: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return `told` of every rank, if all have the same digest; errors and cost are those of `agree_on_plan`."""
    gathered = _gather((digest, told), group)
    majority, _ = Counter(made for made, _ in gathered).most_common(1)[0]
    different = [rank for rank, (made, _) in enumerate(gathered) if made != majority]
    if different:
        raise LayoutError(f"ranks {different} made another reshard plan than the rest: their placements differ")
    return [beside for _, beside in gathered]


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _raise_first(problems: Iterable[str]) -> None:
    for problem in problems:
        if problem:
            raise LayoutError(problem)


def _types(tensors: Tensors, shards: Iterable[Shard]) -> Types:
    """Return types by HF name, after checking that every shard fits its live tensor."""
    for shard in shards:
        shard.locate(tensors)
    return {shard.hf_name: tensors[shard.local].dtype for shard in shards if shard.hf_name != PADDING}
