"""Comparing rollout weights with training weights bit for bit, without the planner.

Every training shard is broadcast by its first holder and compared wherever its slice meets a rollout shard. This shares
only the layout tables with the exchange, so a fault in planning, cutting, packing or scattering cannot hide itself.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from post_training.layouts.layout import PADDING, Shard, Slice
from post_training.reshard.exchange import Side
from post_training.reshard.plan import Layouts
from post_training.reshard.schedule import ALIGNMENT
from post_training.tensor_parts import PART_ELEMENTS, copy_in_parts, parts_of

_COMPARED_ELEMENTS = PART_ELEMENTS // 8
"""Elements of at most 8 bytes each, which are compared as bytes."""


def differing_tensors(
    train: Side,
    rollout: Side,
    train_layouts: Layouts,
    group: dist.ProcessGroup,
    batch_bytes: int,
    device: torch.device,
) -> list[str]:
    """The HF names of which any rank's rollout bytes differ from the training bytes, sorted; same on every rank.

    train.wire_types: the types in which training holds its tensors. Where the rollout holds another one, values are
    compared, in the wider of the two: a weight that was rounded on its way differs.
    NaN is equal to nothing: a tensor that holds one differs even where both sides have the same bits.
    batch_bytes: how much is broadcast at once (at least one shard). Padding that is not zero is reported by local name.
    """
    targets = Targets(rollout)
    found = targets.dirty_padding()
    for batch in batches(train_layouts, train.wire_types, batch_bytes):
        found |= targets.differing(batch, broadcast(batch, train, group, device), train.wire_types)
    gathered: list[set[str]] = [set() for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, found, group=group)
    return sorted(set().union(*gathered))


@dataclass(frozen=True)
class Batch:
    """Training shards that are broadcast at once by one holder, with the bytes of each in the buffer."""

    holder: int
    shards: list[tuple[Shard, int]]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.shards)


def batches(layouts: Layouts, wire_types: Mapping[str, torch.dtype], batch_bytes: int) -> Iterator[Batch]:
    """Every training weight once, in batches of at most `batch_bytes` (at least one shard); the same on every rank."""
    for holder, shards in enumerate(first_copies(layouts)):
        batch = Batch(holder, [])
        for shard in shards:
            size = torch.Size(shard.extents).numel() * wire_types[shard.hf_name].itemsize
            size += -size % ALIGNMENT
            if batch.shards and batch.size + size > batch_bytes:
                yield batch
                batch = Batch(holder, [])
            batch.shards.append((shard, size))
        if batch.shards:
            yield batch


def broadcast(batch: Batch, train: Side, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """The bytes of a batch on every rank, each weight in its wire type. All ranks of the group must call it."""
    buffer = torch.zeros(batch.size, dtype=torch.uint8, device=device)
    if dist.get_rank(group) == batch.holder:
        for shard, region in _regions(batch, buffer, train.wire_types):
            copy_in_parts(region, shard.locate(train.tensors))
    for part in parts_of(buffer):  # one shard may be larger than a batch
        dist.broadcast(part, dist.get_global_rank(group, batch.holder), group=group)
    return buffer


class Targets:
    """The rollout weights of one rank, to be compared with batches of training weights."""

    def __init__(self, rollout: Side) -> None:
        self._tensors = rollout.tensors
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for shard in rollout.shards:
            self._shards[shard.hf_name].append(shard)

    def dirty_padding(self) -> set[str]:
        """The local names of padding that is not zero."""
        shards = self._shards.get(PADDING, [])
        return {shard.local for shard in shards if bool(shard.locate(self._tensors).any())}

    def differing(self, batch: Batch, buffer: torch.Tensor, wire_types: Mapping[str, torch.dtype]) -> set[str]:
        """The hf_name names of those weights that differ from a batch where both hold them."""
        return {
            shard.hf_name
            for shard, region in _regions(batch, buffer, wire_types)
            for target in self._shards.get(shard.hf_name, [])
            if not _equal_where_both(shard.bounds, region, target.bounds, target.locate(self._tensors))
        }


def first_copies(layouts: Layouts) -> Iterator[list[Shard]]:
    """For every rank the shards that no lower rank holds."""
    seen: set[tuple[str, Slice]] = {(PADDING, ())}
    for shards in layouts:
        mine = []
        for shard in shards:
            if shard.hf_name != PADDING and (shard.hf_name, shard.bounds) not in seen:
                seen.add((shard.hf_name, shard.bounds))
                mine.append(shard)
        yield mine


def _regions(
    batch: Batch, buffer: torch.Tensor, wire_types: Mapping[str, torch.dtype]
) -> Iterator[tuple[Shard, torch.Tensor]]:
    offset = 0
    for shard, size in batch.shards:
        wire_type = wire_types[shard.hf_name]
        count = torch.Size(shard.extents).numel()
        yield shard, buffer[offset : offset + count * wire_type.itemsize].view(wire_type).view(shard.extents)
        offset += size


def _equal_where_both(bounds: Slice, values: torch.Tensor, target_bounds: Slice, target: torch.Tensor) -> bool:
    starts = [max(left[0], right[0]) for left, right in zip(bounds, target_bounds, strict=True)]
    stops = [min(left[1], right[1]) for left, right in zip(bounds, target_bounds, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return True

    def cut(tensor: torch.Tensor, origin: Slice) -> torch.Tensor:
        edges = zip(starts, stops, origin, strict=True)
        inner = tensor[tuple(slice(start - low, stop - low) for start, stop, (low, _) in edges)]
        return inner.contiguous().flatten()

    mine, theirs = cut(values, bounds), cut(target, target_bounds)
    if mine.dtype != theirs.dtype:
        wider = torch.promote_types(mine.dtype, theirs.dtype)
        mine, theirs = mine.to(wider), theirs.to(wider)
    # As bytes, where 0 and -0 differ, and as values, where NaN differs from itself.
    return all(
        torch.equal(part.view(torch.uint8), other.view(torch.uint8)) and torch.equal(part, other)
        for part, other in zip(parts_of(mine, _COMPARED_ELEMENTS), parts_of(theirs, _COMPARED_ELEMENTS), strict=True)
    )
