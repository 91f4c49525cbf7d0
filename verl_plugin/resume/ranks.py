"""verl's training ranks as this project's checkpoints see them: which slices of HuggingFace tensors each holds."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from post_training.checkpoint.optimizer_shards import OptimizerShard
from post_training.checkpoint.training_files import MOMENTS, owned_shards
from post_training.checkpoint.training_rank import MegatronRank
from post_training.layouts.fsdp_shards import fsdp_shards, local_tensors
from post_training.layouts.layout import Shard, Table
from post_training.layouts.model_tensors import train_tensors
from post_training.models.families import table_for
from verl_plugin.alltoallv.megatron_layout import fitted, megatron_placement


class MegatronCoreRank(MegatronRank):
    """A rank of Megatron-core 0.16, whose parameters have other names than the layouts'."""

    @cached_property
    def shards(self) -> list[Shard]:
        return self._fitted(self.table.megatron(self.placement, self.rank))

    @cached_property
    def owned(self) -> list[Shard]:
        """The layouts' owned shards, but each rank's own rows of weights that the layouts have whole on every rank."""
        whole = self.table.megatron(self.placement, self.rank)
        cut = [own for own, other in zip(self.shards, whole, strict=True) if own.bounds != other.bounds]
        names = {shard.hf_name for shard in cut}
        written = self._fitted(owned_shards(self.table, self.placement, self.rank))
        return [*cut, *(shard for shard in written if shard.hf_name not in names)]

    @cached_property
    def optimizer_shards(self) -> list[OptimizerShard]:
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        return [shard for part in self._on_host for shard in part.shards(names)] or super().optimizer_shards

    def create_states(self, steps: int) -> None:
        """Create states as `MegatronRank` does, for optimizers on the host too."""
        for part in self._on_host:
            part.optimizer.create_states(steps) if steps else part.optimizer.clear_states()
        if not self._on_host:
            super().create_states(steps)

    @property
    def _on_host(self) -> list[Any]:
        from verl_plugin.resume.hybrid_optimizer import hybrid_parts  # needs Megatron-core

        return hybrid_parts(self.optimizer)

    def _fitted(self, shards: list[Shard]) -> list[Shard]:
        return fitted(shards, self.tensors, self.placement, self.rank)


def megatron_rank(engine: Any) -> MegatronCoreRank:
    """Return the rank of verl's engine for Megatron-core in this process."""
    tensors = train_tensors(engine.module)
    placement = megatron_placement(engine.tf_config, tensors)
    table = table_for(engine.model_config.hf_config)
    return MegatronCoreRank(table, placement, dist.get_rank(), tensors, engine.optimizer)


@dataclass(frozen=True)
class LocalElements:
    """This rank's share of a parameter; its optimizer updates all of it.

    Attributes:
        local: the parameter's name.
        parameter: a DTensor.
        state: torch's AdamW state for it, empty before the first update.
        start: first element of the share, always 0.
    """

    local: str
    parameter: DTensor
    state: MutableMapping[str, Any]
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.to_local().shape)

    @property
    def stop(self) -> int:
        return self.parameter.to_local().numel()

    @property
    def master(self) -> torch.Tensor:
        return _elements(self.parameter)

    @property
    def steps(self) -> int:
        return int(self.state["step"]) if self.state else 0

    def moments(self) -> dict[str, torch.Tensor]:
        """Return AdamW's averages by name, as vectors; empty before the first update."""
        return {name: _elements(self.state[name]) for name in MOMENTS if name in self.state}


@dataclass(frozen=True)
class FSDP2Rank:
    """A `TrainingRank` of verl's engine for FSDP2.

    Attributes:
        module: transformers model, sharded.
        optimizer: torch's AdamW over the module's DTensors.
    """

    table: Table
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    world_size: int

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.table.shapes

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return local_tensors(self.module.state_dict())

    @cached_property
    def shards(self) -> list[Shard]:
        return fsdp_shards(self.module.state_dict(), self.table.shapes)

    @property
    def weights(self) -> Sequence[Shard]:
        """The buffers: the optimizer's elements are the model's own."""
        trained = {elements.local for elements in self.optimizer_shards}
        return [shard for shard in self.shards if shard.local not in trained]

    @property
    def owned(self) -> Sequence[Shard]:
        return self.shards

    @property
    def untrained(self) -> Sequence[Shard]:
        return self.weights if self.rank == 0 else []

    @cached_property
    def optimizer_shards(self) -> list[LocalElements]:
        return [
            LocalElements(name, parameter, self.optimizer.state[parameter])
            for name, parameter in self.module.named_parameters()
            if isinstance(parameter, DTensor) and parameter.to_local().numel()
        ]

    def create_states(self, steps: int) -> None:
        """Set averages of zero and count `steps` updates; with 0 steps, clear the states as in a new optimizer."""
        for _, parameter in self.module.named_parameters():
            state = self.optimizer.state[parameter]
            state.clear()
            if steps:
                state["step"] = torch.tensor(float(steps), dtype=torch.float32)
                state.update({name: torch.zeros_like(parameter.detach()) for name in MOMENTS})


def fsdp2_rank(engine: Any) -> FSDP2Rank:
    """Return the rank of verl's engine for FSDP2 in this process."""
    table = table_for(engine.model_config.hf_config)
    return FSDP2Rank(table, engine.module, engine.optimizer, dist.get_rank(), dist.get_world_size())


def _elements(tensor: DTensor) -> torch.Tensor:
    """Return the elements of this rank's share as a vector, without a copy."""
    return tensor.detach().to_local().view(-1)
