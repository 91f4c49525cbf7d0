"""The live tensors of a model by local name, with the wrappers of the training framework taken off."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import nn

from post_training.layouts.layout import Shard

ACTIVE_BUFFERS = ("expert_bias", "e_score_correction_bias")
"""Buffers that are weights; every other buffer (rotary tables, masks) is derived and never moved."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Take off wrappers such as Megatron's DistributedDataParallel and Float16Module; both call the model `module`."""
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module
    return module


def weight_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that are weights, each storage once, by the model's own names.

    The values are the parameter objects themselves: read `.data` when it is needed, because offloading replaces it.
    """
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    tensors |= {name: buffer for name, buffer in module.named_buffers() if name.endswith(ACTIVE_BUFFERS)}
    return tensors


def rollout_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a vLLM model."""
    return weight_tensors(unwrapped(model))


def train_tensors(actor_module: nn.Module | Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """The weights of verl's actor module: one Megatron model, or one for each virtual pipeline stage.

    With several, names start with `chunks.<number>.`, as `TrainPlacement.chunk_prefix` says.
    """
    if isinstance(actor_module, nn.Module) and not isinstance(actor_module, nn.ModuleList):
        chunks = [actor_module]
    else:
        chunks = list(actor_module)
    if len(chunks) == 1:
        return weight_tensors(unwrapped(chunks[0]))
    return {
        f"chunks.{number}.{name}": tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in weight_tensors(unwrapped(chunk)).items()
    }


def wholly_covered(tensors: Mapping[str, torch.Tensor], shards: Iterable[Shard]) -> list[torch.Tensor]:
    """The tensors of which a layout names every element: filling its shards leaves nothing of them as it was."""
    named: Counter[str] = Counter()
    for shard in shards:
        named[shard.local] += prod(shard.extents)
    return [tensor for name, tensor in tensors.items() if named[name] == tensor.numel()]
