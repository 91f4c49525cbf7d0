"""An FSDP rank for saving and loading: its shards of flat parameters, by the names of the parameters in them.

FSDP concatenates the parameters of a wrapped module into one vector, and each rank has an equal stretch of it. With two
weights of 6 and 4 elements on two ranks, rank 0 has five elements of the first, and rank 1 its last one and all of the
second:

    flat      a0 a1 a2 a3 a4 | a5 b0 b1 b2 b3
    rank 0    a[0:5]
    rank 1                     a[5:6], b[0:4]

A transformers model has its weights under their HF names, or under names from which those follow, each whole and row by
row, so a stretch of the vector is a stretch of every weight that it touches.

FSDP2 shards the rows of every weight over the ranks: for a weight of 3 rows of 2 elements on two ranks, rank 0 has
a[0:4] and rank 1 a[4:6].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from post_training.checkpoint.training_files import MOMENTS
from post_training.layouts.layout import Shard, as_matrix, whole_slice
from post_training.layouts.published_names import published_name


@dataclass(frozen=True)
class FlatShard:
    """The elements `start` to `stop` of a weight, at `offset` in this rank's shard of a flat parameter.

    Attributes:
        local: the weight's name.
        shape: of the weight as a matrix.
        start, stop, offset: see above.
        flat: the shard, a vector, or the DTensor that it is the local part of.
        state: torch AdamW's state for the whole shard, empty before the first update.
    """

    local: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    flat: torch.Tensor
    state: Mapping[str, torch.Tensor]

    @property
    def master(self) -> torch.Tensor:
        """The elements that the optimizer updates, a vector."""
        return self._part(self.flat)

    @property
    def steps(self) -> int:
        """Number of updates that these elements have had."""
        return int(self.state["step"]) if self.state else 0

    def moments(self) -> dict[str, torch.Tensor]:
        """Return AdamW's moments by name, vectors; none before the first update."""
        return {name: self._part(self.state[name]) for name in MOMENTS if name in self.state}

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return _vector(whole)[self.offset : self.offset + self.stop - self.start]


@dataclass(frozen=True)
class FsdpRank:
    """A `TrainingRank` whose transformers model is sharded by FSDP without `use_orig_params`.

    Its `optimizer` is torch's AdamW over the flat parameters.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    world_size: int

    @cached_property
    def _flat(self) -> list[tuple[str, Any]]:
        """(prefix of its names, FSDP's handle) for each flat parameter."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        found = []
        for name, module in self.model.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                found.append((name, module._handle))
        return found

    def _weights(self) -> Iterator[tuple[str, tuple[int, ...], Any, Any]]:
        """Yield (name, shape, place of its elements in this rank's shard, handle) for each weight."""
        from torch.distributed.fsdp._common_utils import clean_tensor_name

        for prefix, handle in self._flat:
            flat = handle.flat_param
            for name, shape, where in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
                yield published_name(clean_tensor_name(f"{prefix}.{name}").lstrip(".")), as_matrix(shape), where, handle

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers in the model's state; every rank has all of them whole."""
        from torch.distributed.fsdp._common_utils import clean_tensor_name

        found = {}
        for prefix, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[published_name(clean_tensor_name(f"{prefix}.{name}").lstrip("."))] = buffer
        return found

    @property
    def _weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape, _, _ in self._weights()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of the model by name; tied ones appear once, as in FSDP."""
        return self._weight_shapes | {name: tuple(buffer.shape) for name, buffer in self.tensors.items()}

    @cached_property
    def shards(self) -> list[Shard]:
        return [Shard(name, whole_slice(shape), name) for name, shape in self.shapes.items()]

    @property
    def weights(self) -> list[Shard]:
        """The buffers only: the optimizer's elements are the model's weights themselves."""
        return [shard for shard in self.shards if shard.local in self.tensors]

    @property
    def owned(self) -> list[Shard]:
        return self.shards

    @property
    def untrained(self) -> list[Shard]:
        return self.weights if self.rank == 0 else []

    @cached_property
    def optimizer_shards(self) -> list[FlatShard]:
        found = []
        for name, shape, where, handle in self._weights():
            if where.in_shard:
                start, stop = where.intra_param_start_idx, where.intra_param_end_idx + 1
                flat, state = _shard_of(handle), self.optimizer.state[handle.flat_param]
                found.append(FlatShard(name, shape, start, stop, where.offset_in_shard, flat, state))
        return found

    def create_states(self, steps: int) -> None:
        """Initialise moments of zero after `steps` updates; with 0 steps, no state, like a new optimizer."""
        for _, handle in self._flat:
            state: MutableMapping[str, torch.Tensor] = self.optimizer.state[handle.flat_param]
            state.clear()
            if steps:
                state["step"] = torch.tensor(float(steps), dtype=torch.float32)
                state.update({name: torch.zeros_like(_shard_of(handle)) for name in MOMENTS})


class FullyShardedRank(FsdpRank):
    """An `FsdpRank` whose model FSDP2 has sharded, with torch's AdamW over its DTensors."""

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        """The parameters, DTensors, by name."""
        from verl_patches.features.compatibility.fully_sharded import release

        release(self.model)  # gathered parameters are no DTensors
        return {published_name(name): parameter for name, parameter in self.model.named_parameters()}

    @property
    def _weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: as_matrix(parameter.shape) for name, parameter in self._parameters.items()}

    @cached_property
    def optimizer_shards(self) -> list[FlatShard]:
        found = []
        for name, parameter in self._parameters.items():
            shape, count = as_matrix(parameter.shape), _vector(parameter).numel()
            if count:
                # torch rounds the rows per rank up, so the last ranks may have fewer or none.
                start = self.rank * -(-shape[0] // self.world_size) * math.prod(shape[1:])
                found.append(
                    FlatShard(name, shape, start, start + count, 0, parameter, self.optimizer.state[parameter])
                )
        return found

    def create_states(self, steps: int) -> None:
        for parameter in self._parameters.values():
            state: MutableMapping[str, torch.Tensor] = self.optimizer.state[parameter]
            state.clear()
            if steps:
                state["step"] = torch.tensor(float(steps), dtype=torch.float32)
                state.update({name: torch.zeros_like(parameter.detach()) for name in MOMENTS})


def _vector(tensor: Any) -> torch.Tensor:
    """Return a vector, or this rank's part of a DTensor as a vector, without a copy."""
    from torch.distributed.tensor import DTensor

    return tensor.detach().to_local().view(-1) if isinstance(tensor, DTensor) else tensor.detach()


def _shard_of(handle: Any) -> torch.Tensor:
    """Return this rank's elements of a flat parameter, whether or not it is gathered at the moment."""
    flat = handle.flat_param
    return getattr(flat, "_local_shard", flat.data)
