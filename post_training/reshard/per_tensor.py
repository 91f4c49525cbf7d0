"""Move weights without resharding: every tensor as a whole, to every rank, one after the other.

verl does this for the models that it supports; our exchange is measured against it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from post_training.layouts.layout import PADDING, Shard, Slice
from post_training.reshard.agreement import OwnSide, agree_on_types
from post_training.reshard.exchange import Tensors
from post_training.reshard.overlaps import Layouts
from post_training.tensor_parts import copy_in_parts, parts_of


def full_tensors(
    tensors: Tensors,
    layouts: Layouts,
    shapes: Mapping[str, tuple[int, ...]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every HuggingFace tensor of the model by name, as a whole, on every rank.

    The first holder of each region broadcasts it. All ranks must exhaust the iterator.

    Args:
        tensors: live training tensors of this rank.
        layouts: training shards of all ranks.
        shapes: of all HF tensors.
        group: all ranks.
        device: of the yielded tensors.
    """
    (types,) = agree_on_types([OwnSide.of(tensors, layouts, dist.get_rank(group))], group)
    holders: dict[str, dict[Slice, int]] = defaultdict(dict)
    for rank, shards in enumerate(layouts):
        for shard in shards:
            if shard.hf_name != PADDING:
                holders[shard.hf_name].setdefault(shard.bounds, rank)
    own: dict[tuple[str, Slice], Shard] = {
        (shard.hf_name, shard.bounds): shard for shard in layouts[dist.get_rank(group)]
    }
    for name, shape in shapes.items():
        full = torch.empty(shape, dtype=types[name], device=device)
        for bounds, holder in holders[name].items():
            region = full[tuple(slice(*interval) for interval in bounds)]
            values = torch.empty_like(region, memory_format=torch.contiguous_format)
            if holder == dist.get_rank(group):
                copy_in_parts(values, own[name, bounds].locate(tensors))
            for part in parts_of(values):
                dist.broadcast(part, dist.get_global_rank(group, holder), group=group)
            copy_in_parts(region, values)
        yield name, full
