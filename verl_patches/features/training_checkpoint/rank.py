"""A training rank as saving and loading see it, and how the ranks agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.flat_ranges import FlatPart, flat_parts
from post_training.layouts.layout import Piece, Table, TrainPlacement
from verl_patches.features.training_checkpoint.optimizer_shards import OptimizerShard, optimizer_shards


@dataclass(frozen=True)
class TrainingRank:
    """table: the model's layouts. placement, rank: which of them is this rank's.

    tensors: the model's live weights by local name, the parameter objects themselves. optimizer: Megatron's.
    """

    table: Table
    placement: TrainPlacement
    rank: int
    tensors: Mapping[str, torch.Tensor]
    optimizer: Any

    @cached_property
    def pieces(self) -> list[Piece]:
        """Everything that this rank holds."""
        return self.table.megatron(self.placement, self.rank)

    @cached_property
    def shards(self) -> list[OptimizerShard]:
        """What this rank's optimizer holds."""
        return optimizer_shards(self.optimizer, self.tensors)


def parts_of_shard(shard: OptimizerShard, pieces: Mapping[str, list[Piece]]) -> Iterable[FlatPart]:
    """The boxes of a shard that `pieces`, by local name, speak of."""
    for piece in pieces.get(shard.local, ()):
        yield from flat_parts(shard.shape, piece, shard.start, shard.stop)


def by_local(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Pieces by the local tensor that they lie in."""
    grouped: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        grouped[piece.local].append(piece)
    return grouped


def agree(problem: str, value: Any = None) -> list[Any]:
    """Every rank's `value`, or the first problem of any rank, on all of them. One object collective.

    Raises CheckpointError on every rank when one has a problem.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (problem, value))
    for trouble, _ in gathered:
        if trouble:
            raise CheckpointError(trouble)
    return [each for _, each in gathered]
