"""The shards of an FSDP2 rank: one slice of every parameter, as given by torch's placements.

Names are those of the model's `state_dict`, which for transformers' models are HF names with two exceptions. Newer
transformers put decoder and vision tower into modules of their own (`published_names`), and transformers 5 packs the
experts of a layer into one parameter per projection:

    mlp.experts.gate_up_proj (experts, 2 * width, hidden)      gate_proj above up_proj
    mlp.experts.down_proj    (experts, hidden, width)

FSDP2 shards the first dimension, so a rank has whole experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from post_training.layouts.layout import LocalView, Shard, Slice
from post_training.layouts.published_names import published_name

_PACKED = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)(?P<weight>gate_up_proj|down_proj)$")


def local_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the local part of every tensor of a `state_dict`, on its device."""
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}


def fsdp_shards(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> list[Shard]:
    """Return the shards of this rank.

    Args:
        state: the model's `state_dict`, of DTensors and of plain tensors, which every rank has whole.
        shapes: of the model's HuggingFace tensors. Other tensors, such as the second name of a tied embedding, get no
            shard.

    Raises:
        ValueError: a tensor is sharded in a way that bounds cannot express, or packed experts are not sharded by
            expert.
    """
    return [
        shard
        for name, value in state.items()
        for shard in part_shards(name, _bounds(name, value), tuple(value.shape), shapes)
    ]


def part_shards(
    name: str, bounds: Slice, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Shard]:
    """Yield the shards in a rank's part of one tensor of the `state_dict`.

    Args:
        name: of the tensor.
        bounds: of the part.
        shape: of the whole tensor.
        shapes: of the model's HuggingFace tensors.

    Raises:
        ValueError: packed experts are not sharded by expert.
    """
    packed = _PACKED.match(name)
    if any(start >= stop for start, stop in bounds):
        return  # more ranks than rows
    if packed:
        yield from _experts(name, packed["prefix"], packed["weight"], bounds, shape)
    elif (published := published_name(name)) in shapes:
        yield Shard(published, bounds, name)


def _bounds(name: str, value: torch.Tensor) -> Slice:
    if not isinstance(value, DTensor):
        return tuple((0, extent) for extent in value.shape)
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError(f"{name} has the placements {value.placements}, with which no rank owns a part of the weight")
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    held = tuple(value.to_local().shape)
    if tuple(shape) != held:
        raise ValueError(
            f"{name}: the rank has {held}, but torch's placement {value.placements} implies {tuple(shape)}"
        )
    return tuple((start, start + extent) for start, extent in zip(offset, shape, strict=True))


def _experts(name: str, prefix: str, weight: str, bounds: Slice, shape: tuple[int, ...]) -> Iterator[Shard]:
    (first, last), *matrix = bounds
    if matrix != [(0, extent) for extent in shape[1:]]:
        raise ValueError(f"{name}: FSDP2 shards inside experts, but only shards of whole experts are supported")
    for slot in range(last - first):
        expert = f"{prefix}{first + slot}."
        if weight == "down_proj":
            yield Shard(f"{expert}down_proj.weight", tuple(matrix), name, LocalView(index=(slot,)))
            continue
        width, hidden = shape[1] // 2, shape[2]
        for at, part in enumerate(("gate_proj", "up_proj")):
            view = LocalView(index=(slot, (at * width, (at + 1) * width)))
            yield Shard(f"{expert}{part}.weight", ((0, width), (0, hidden)), name, view)
