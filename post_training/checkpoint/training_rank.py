"""Interfaces of a training rank for saving and loading, and Megatron's implementation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.flat_ranges import FlatPart, flat_parts
from post_training.checkpoint.optimizer_shards import OptimizerShard, optimizer_shards
from post_training.checkpoint.training_files import is_first_peer, owned_shards
from post_training.layouts.layout import Shard, Table, TrainPlacement


class AnyOptimizerShard(Protocol):
    """The elements `start` to `stop` of a local weight of this `shape`, which this rank's optimizer updates."""

    @property
    def local(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...

    @property
    def master(self) -> torch.Tensor:
        """The elements that the optimizer updates, a vector."""

    @property
    def steps(self) -> int:
        """Number of updates of these elements."""

    def moments(self) -> dict[str, torch.Tensor]:
        """Return AdamW's averages by name, as vectors; empty before the first update."""


class TrainingRank(Protocol):
    """Interface of a training rank for checkpoints, independent of the backend that shards the model.

    Attributes:
        shapes: of all HF tensors of the model, by name.
        tensors: live tensors by local name.
        shards: all shards on this rank.
        weights: those of `shards` that are loaded into `tensors`, beside the optimizer's elements.
        owned: those of `shards` whose optimizer elements this rank writes, if they are in `optimizer_shards`.
        untrained: shards in `tensors` that no optimizer updates, and that this rank writes whole.
        optimizer_shards: the elements that this rank's optimizer updates.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def weights(self) -> Sequence[Shard]: ...
    @property
    def owned(self) -> Sequence[Shard]: ...
    @property
    def untrained(self) -> Sequence[Shard]: ...
    @property
    def optimizer_shards(self) -> Sequence[AnyOptimizerShard]: ...

    def create_states(self, steps: int) -> None:
        """Set averages of zero and count `steps` updates; with 0 steps, clear the states as in a new optimizer."""


@dataclass(frozen=True)
class MegatronRank:
    """A `TrainingRank` of Megatron with its distributed optimizer.

    Attributes:
        table: the model's sharding spec.
        placement, rank: select this rank's layout.
        tensors: the model's live weights by local name: the parameter objects themselves.
        optimizer: Megatron's.
    """

    table: Table
    placement: TrainPlacement
    rank: int
    tensors: Mapping[str, torch.Tensor]
    optimizer: Any

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.table.shapes

    @cached_property
    def shards(self) -> list[Shard]:
        return self.table.megatron(self.placement, self.rank)

    @property
    def weights(self) -> list[Shard]:
        """All shards: the model has its own weights beside the optimizer's float32 ones."""
        return self.shards

    @cached_property
    def owned(self) -> list[Shard]:
        return owned_shards(self.table, self.placement, self.rank)

    @property
    def untrained(self) -> list[Shard]:
        return [
            shard
            for shard in self.owned
            if not self.tensors[shard.local].requires_grad and is_first_peer(self.placement, self.rank, shard)
        ]

    @cached_property
    def optimizer_shards(self) -> list[OptimizerShard]:
        return optimizer_shards(self.optimizer, self.tensors)

    def create_states(self, steps: int) -> None:
        """Set averages of zero and count `steps` updates; with 0 steps, clear the states as in a new optimizer."""
        for optimizer_shard in self.optimizer_shards:
            optimizer_shard.create_state(steps)


def parts_of_optimizer_shard(
    optimizer_shard: AnyOptimizerShard, shards: Mapping[str, list[Shard]]
) -> Iterable[FlatPart]:
    """Yield the parts of an optimizer shard that are slices of `shards`, which are by local name."""
    for shard in shards.get(optimizer_shard.local, ()):
        yield from flat_parts(optimizer_shard.shape, shard, optimizer_shard.start, optimizer_shard.stop)


def by_local(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """Group shards by their local tensor."""
    grouped: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        grouped[shard.local].append(shard)
    return grouped


def common_steps(optimizer_shards: Iterable[AnyOptimizerShard]) -> int:
    """Return the number of updates of all shards. Raises CheckpointError if they differ."""
    counts = {optimizer_shard.steps for optimizer_shard in optimizer_shards}
    if len(counts) > 1:
        raise CheckpointError(f"the optimizer's weights have had different numbers of updates: {sorted(counts)}")
    return counts.pop() if counts else 0
