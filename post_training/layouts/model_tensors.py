"""The live tensors of a model by local name, without the wrappers of the training framework."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import nn

from post_training.layouts.layout import Shard

ACTIVE_BUFFERS = ("expert_bias", "e_score_correction_bias")
"""Names of buffers that are weights; all other buffers (rotary tables, masks) are derived and never moved."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Remove wrappers such as Megatron's DistributedDataParallel and Float16Module; both call the model `module`."""
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module
    return module


def weight_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and the buffers that are weights, each storage once, by the model's own names.

    The values are the parameter objects themselves: read `.data` when it is needed, because offloading replaces it.
    """
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    tensors |= {name: buffer for name, buffer in module.named_buffers() if name.endswith(ACTIVE_BUFFERS)}
    return tensors


def rollout_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a vLLM model."""
    return weight_tensors(unwrapped(model))


def train_tensors(actor_module: nn.Module | Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the weights of verl's actor module: one Megatron model, or one per virtual pipeline stage.

    If there are several, names start with `chunks.<number>.`, as in `TrainPlacement.chunk_prefix`.
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
    """Return the tensors that the shards cover completely, so that filling the shards overwrites every element."""
    named: Counter[str] = Counter()
    for shard in shards:
        named[shard.local] += prod(shard.extents)
    return [tensor for name, tensor in tensors.items() if named[name] == tensor.numel()]
