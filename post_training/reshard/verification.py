"""Compare rollout weights with training weights bit for bit, without the planner.

Every training shard is broadcast by its first holder and compared wherever its slice meets a rollout shard. This shares
only the sharding specs with the exchange, so a fault in planning, cutting, packing or scattering cannot hide itself.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from post_training.layouts.layout import PADDING, Shard, Slice
from post_training.reshard.exchange import Side
from post_training.reshard.overlaps import Layouts
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
    """Return the sorted HF names whose rollout bytes differ from the training bytes on any rank; the same on all ranks.

    If a rollout tensor has another type, values are compared in the wider of the two, so a weight that was rounded on
    its way differs. NaN equals nothing: a tensor with NaN differs even if both sides have the same bits. Padding that
    is not zero is reported by local name.

    Args:
        train: training side; its `wire_types` are the types in which training holds its tensors.
        rollout: rollout side.
        train_layouts: training shards of all ranks.
        group: all ranks.
        batch_bytes: bytes to broadcast at once (at least one shard).
        device: for broadcasts.
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
    """Training shards that one holder broadcasts at once, with the bytes of each in the buffer."""

    holder: int
    shards: list[tuple[Shard, int]]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.shards)


def batches(layouts: Layouts, wire_types: Mapping[str, torch.dtype], batch_bytes: int) -> Iterator[Batch]:
    """Yield every training weight once, in batches of at most `batch_bytes` (or one shard); the same on every rank."""
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
    """Return the bytes of a batch on every rank, each weight in its wire type. All ranks of the group must call it."""
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
        """Return the local names of padding that is not zero."""
        shards = self._shards.get(PADDING, [])
        return {shard.local for shard in shards if bool(shard.locate(self._tensors).any())}

    def differing(self, batch: Batch, buffer: torch.Tensor, wire_types: Mapping[str, torch.dtype]) -> set[str]:
        """Return the HF names of weights that differ from a batch, wherever both hold them."""
        # A batch of one shard may be as large as the largest weight, so no second copy of it is made.
        if len(batch.shards) > 1 and self._leave_unchanged(batch, buffer, wire_types):
            return set()
        return {
            shard.hf_name
            for shard, region in _regions(batch, buffer, wire_types)
            for target in self._shards.get(shard.hf_name, [])
            if not _equal_where_both(shard.bounds, region, target.bounds, target.locate(self._tensors))
        }

    def _leave_unchanged(self, batch: Batch, buffer: torch.Tensor, wire_types: Mapping[str, torch.dtype]) -> bool:
        """Return whether writing these weights over a batch leaves it unchanged: one comparison for hundreds of them.

        False does not mean that they differ: weights of another type, or held twice, cannot be written into a batch.
        """
        written = buffer.clone()
        for shard, region in _regions(batch, written, wire_types):
            boxes: list[Slice] = []
            for target in self._shards.get(shard.hf_name, []):
                box = _common(shard.bounds, target.bounds)
                if box is None:
                    continue
                held = target.locate(self._tensors)
                if held.dtype != region.dtype or any(_common(box, other) for other in boxes):
                    return False
                boxes.append(box)
                _cut(region, shard.bounds, box).copy_(_cut(held, target.bounds, box))
        return all(map(_same, _by_type(batch, written, wire_types), _by_type(batch, buffer, wire_types)))


def first_copies(layouts: Layouts) -> Iterator[list[Shard]]:
    """Yield for every rank the shards that no lower rank holds."""
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


def _by_type(batch: Batch, buffer: torch.Tensor, wire_types: Mapping[str, torch.dtype]) -> Iterator[torch.Tensor]:
    """Yield the whole buffer of a batch, in parts whose shards have one type."""
    offset = 0
    for wire_type, shards in itertools.groupby(batch.shards, lambda entry: wire_types[entry[0].hf_name]):
        size = sum(size for _, size in shards)
        yield buffer[offset : offset + size].view(wire_type)
        offset += size


def _common(bounds: Slice, others: Slice) -> Slice | None:
    """Return the intersection of two slices of a tensor; None if it is empty."""
    both = tuple((max(one[0], two[0]), min(one[1], two[1])) for one, two in zip(bounds, others, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _cut(tensor: torch.Tensor, bounds: Slice, box: Slice) -> torch.Tensor:
    """Return the part in `box` of a tensor that holds `bounds`."""
    return tensor[tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, bounds, strict=True))]


def _equal_where_both(bounds: Slice, values: torch.Tensor, target_bounds: Slice, target: torch.Tensor) -> bool:
    box = _common(bounds, target_bounds)
    if box is None:
        return True
    mine = _cut(values, bounds, box).contiguous().flatten()
    theirs = _cut(target, target_bounds, box).contiguous().flatten()
    if mine.dtype != theirs.dtype:
        wider = torch.promote_types(mine.dtype, theirs.dtype)
        mine, theirs = mine.to(wider), theirs.to(wider)
    return _same(mine, theirs)


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two flat tensors of one type are equal as bytes (0 and -0 differ) and as values (NaN differs)."""
    return all(
        torch.equal(part.view(torch.uint8), other.view(torch.uint8)) and torch.equal(part, other)
        for part, other in zip(parts_of(mine, _COMPARED_ELEMENTS), parts_of(theirs, _COMPARED_ELEMENTS), strict=True)
    )
