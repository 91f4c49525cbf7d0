"""Layouts of many ranks, in a form that is small to send and shared in memory.

A plan needs the regions that every rank holds, but places in memory only for its own rank. So ranks exchange numbers
instead of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from post_training.layouts.layout import PADDING, RolloutPlacement, Shard, Slice, Table

_VECTOR = -1


@dataclass(frozen=True)
class Regions:
    """The regions of one rank's shards, in their order.

    Attributes:
        rows: one row per shard: (number of its tensor, row start, row stop, column start, column stop). The number of
            padding is -1, and so are the columns of a vector.
    """

    rows: np.ndarray


@dataclass(frozen=True)
class SideRegions:
    """The regions that all ranks of a group hold on one side, training or rollout.

    Attributes:
        names: of the model's tensors, by number.
        ranks: the regions of each rank.
        own: the shards of this rank.
    """

    names: Sequence[str]
    ranks: Sequence[Regions]
    own: Sequence[Shard]

    def first_held(self, rank: int) -> set[str]:
        """Return the tensors of this rank that no lower rank holds."""
        mine = self.ranks[rank].rows[:, 0]
        fresh = np.zeros(len(self.names) + 1, dtype=bool)
        fresh[mine] = True
        for lower in self.ranks[:rank]:
            fresh[lower.rows[:, 0]] = False
        return {self.names[number] for number in np.flatnonzero(fresh[:-1]).tolist()}


def regions_of(shards: Iterable[Shard], names: Sequence[str]) -> Regions:
    """Return the regions of a rank's shards, which other ranks need.

    Args:
        shards: of the rank.
        names: the model's tensors, in the same order on all ranks.

    Raises:
        ValueError: a shard belongs to another tensor, or has more than two dimensions.
    """
    return _regions([list(shards)], names)[0]


def _regions(layouts: Sequence[Sequence[Shard]], names: Sequence[str]) -> list[Regions]:
    """Return the regions of each layout. Layouts share shard objects, so each object is read only once."""
    numbers = {name: number for number, name in enumerate(names)} | {PADDING: -1}
    distinct = {id(shard): shard for shards in layouts for shard in shards}
    rows = np.array([_row(shard, numbers) for shard in distinct.values()], dtype=np.int32).reshape(-1, 5)
    places = {key: place for place, key in enumerate(distinct)}
    return [
        Regions(rows[np.fromiter(map(places.__getitem__, map(id, shards)), dtype=np.int64, count=len(shards))])
        for shards in layouts
    ]


def _row(shard: Shard, numbers: dict[str, int]) -> tuple[int, ...]:
    if shard.hf_name not in numbers:
        raise ValueError(f"{shard.hf_name} is not a tensor of this model")
    if len(shard.bounds) > 2:
        raise ValueError(
            f"{shard.hf_name} has {len(shard.bounds)} dimensions, but only vectors and matrices can be moved"
        )
    rows, columns = (*shard.bounds, (_VECTOR, _VECTOR))[:2]
    return numbers[shard.hf_name], *rows, *columns


def layouts_of(gathered: Sequence[Regions], names: Sequence[str]) -> list[list[Shard]]:
    """Return the layouts of all ranks, which share equal shards. Their shards have no place in memory.

    >>> whole = Shard("w", ((0, 4), (0, 3)), "model.w")
    >>> first, second = layouts_of([regions_of([whole], ["w"])] * 2, ["w"])
    >>> first[0].bounds == whole.bounds, first[0] is second[0]
    (True, True)
    """
    shared: dict[tuple[int, ...], Shard] = {}

    def shard(row: tuple[int, ...]) -> Shard:
        found = shared.get(row)
        if found is None:
            number, first, last, start, stop = row
            bounds: Slice = ((first, last),) if start == _VECTOR else ((first, last), (start, stop))
            found = shared[row] = Shard(names[number] if number >= 0 else PADDING, bounds, "")
        return found

    return [[shard(row) for row in map(tuple, each.rows.tolist())] for each in gathered]


def rollout_regions(table: Table, placement: RolloutPlacement) -> list[Regions]:
    """Return the regions of all rollout ranks. Instances are copies of each other and share their regions."""
    alone = replace(placement, instances=1)
    layouts = [table.vllm_ascend(alone, rank) for rank in range(alone.world_size)]
    return _regions(layouts, tuple(table.shapes)) * placement.instances
