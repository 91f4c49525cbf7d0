"""Layouts of many ranks, small to send and shared in memory.

A plan needs the regions that every rank holds, but only its own rank's places in memory. So ranks exchange numbers
instead of shards, and equal shards of many ranks are one object.
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

    rows: for each (number of its tensor, row start, row stop, column start, column stop); of padding the number is -1,
        of a vector the columns are.
    """

    rows: np.ndarray


def regions_of(shards: Iterable[Shard], names: Sequence[str]) -> Regions:
    """What others have to know of a rank. names: the model's tensors, in the order that all ranks have.

    Raises ValueError for a shard of another tensor, or of more than two dimensions.
    """
    numbers = {name: number for number, name in enumerate(names)} | {PADDING: -1}
    return Regions(np.array([_row(shard, numbers) for shard in shards], dtype=np.int32).reshape(-1, 5))


def _row(shard: Shard, numbers: dict[str, int]) -> tuple[int, ...]:
    if shard.hf_name not in numbers:
        raise ValueError(f"{shard.hf_name} is no tensor of this model")
    if len(shard.bounds) > 2:
        raise ValueError(f"{shard.hf_name} has {len(shard.bounds)} dimensions, and only vectors and matrices are moved")
    rows, columns = (*shard.bounds, (_VECTOR, _VECTOR))[:2]
    return numbers[shard.hf_name], *rows, *columns


def layouts_of(gathered: Sequence[Regions], names: Sequence[str]) -> list[list[Shard]]:
    """The layouts of all ranks, which share equal shards. They say what a rank holds and not where.

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


def rollout_layouts(table: Table, placement: RolloutPlacement) -> list[list[Shard]]:
    """The layouts of all rollout ranks. Instances are copies of each other and share theirs."""
    alone = replace(placement, instances=1)
    instance = [table.vllm_ascend(alone, rank) for rank in range(alone.world_size)]
    return instance * placement.instances
