"""From two layouts to transfers: which region of which tensor goes from which rank to which rank.

The plan is a pure function of the layouts, so that every rank computes the same one without talking to the others; it
is built from numpy arrays because 256 ranks of DeepSeek-V3 hold a third of a million shards.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np

from post_training.layouts.layout import PADDING, Shard

Layouts = Sequence[Sequence[Shard]]
"""The shards of every rank, by rank."""


class LayoutError(ValueError):
    """Two layouts cannot be joined; the message names the tensor."""


@dataclass(frozen=True)
class Transfers:
    """Transfers as columns, one entry each; a slice is (row start, row stop, column start, column stop).

    source, target: ranks. source_shard, target_shard: positions in the layouts of those ranks.
    name: number of the HF tensor. bounds: its region; a vector has the single column 0:1. bytes: on the wire.
    """

    source: np.ndarray
    target: np.ndarray
    source_shard: np.ndarray
    target_shard: np.ndarray
    name: np.ndarray
    bounds: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    def select(self, chosen: np.ndarray) -> "Transfers":
        """The transfers of a mask or an array of positions."""
        return Transfers(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def between(self, world_size: int) -> np.ndarray:
        """Bytes by source and target: an array (world_size, world_size) of int64."""
        pairs = self.source * world_size + self.target
        return np.bincount(pairs, self.bytes, world_size**2).astype(np.int64).reshape(world_size, world_size)


@dataclass(frozen=True)
class Plan:
    """What every rank sends, receives and copies.

    names: HF tensors by number. itemsize: bytes of one element of each, as it travels.
    remote: transfers between ranks out of training weights, in the order in which each pair of ranks streams them.
    relay: transfers that follow, inside a node, out of rollout weights that have arrived; `source_shard` is a position
        in the rollout layout. Empty when all ranks are in one node.
    local: transfers inside a rank, which need no communication.
    digest: equal on two ranks if and only if they made the same plan.
    """

    world_size: int
    names: tuple[str, ...]
    itemsize: np.ndarray
    remote: Transfers
    relay: Transfers
    local: Transfers
    digest: str


@dataclass(frozen=True)
class RankPlan:
    """What one rank sends, receives and copies, and how much travels between all.

    remote, local: as of `Plan`, those from or to this rank. traffic: bytes by source and target of all ranks, with
    what a rank copies on the diagonal. widest_row: bytes of the longest row of a region. digest: equal on two ranks if
    and only if they planned from the same layouts.
    """

    remote: Transfers
    local: Transfers
    traffic: np.ndarray
    widest_row: int
    digest: str


@dataclass(frozen=True)
class _Holders:
    """The distinct regions of one side and who holds each: entries `first[i]:first[i+1]` of `rank` and `shard`."""

    name: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    rank: np.ndarray
    shard: np.ndarray

    @property
    def count(self) -> np.ndarray:
        return np.diff(self.first)


@dataclass(frozen=True)
class _Overlaps:
    """Regions that are needed and owned: entry by entry the positions in `needs` and `owners`, and what is common.

    sizes: bytes of one element of each tensor.
    """

    needs: _Holders
    owners: _Holders
    need: np.ndarray
    owner: np.ndarray
    bounds: np.ndarray
    sizes: np.ndarray

    @property
    def bytes(self) -> np.ndarray:
        return _volume(self.bounds) * self.sizes[self.owners.name[self.owner]]

    def select(self, chosen: np.ndarray) -> "_Overlaps":
        return replace(self, need=self.need[chosen], owner=self.owner[chosen], bounds=self.bounds[chosen])


def make_plan(
    train: Layouts, rollout: Layouts, itemsize: Callable[[str], int], node_of: Sequence[int] | None = None
) -> Plan:
    """Plan the transfers that give every rollout shard its content.

    train, rollout: layouts of all ranks; itemsize: bytes of one element of an HF tensor, as it travels.
    node_of: the node of every rank, numbered from 0; None means that all are in one.

    A rank that holds a region itself copies it. Otherwise an owner in its node sends it, and owners take turns. A
    region that nobody in a node holds enters it once, at the receiver with the least to pass on, which relays it.
    Raises LayoutError when training shards overlap without being equal, or when a rollout shard has no complete source.
    """
    if len(train) != len(rollout):
        raise LayoutError(f"{len(train)} training ranks cannot be joined with {len(rollout)} rollout ranks")
    numbers: dict[str, int] = {}
    owners, needs = _holders(train, numbers), _holders(rollout, numbers)
    names = tuple(numbers)
    sizes = np.array([itemsize(name) for name in names], dtype=np.int64)
    _check_disjoint(owners, names)
    overlaps = _overlaps(needs, owners, sizes)
    _check_complete(overlaps, names)
    nodes = np.zeros(len(train), dtype=np.int64) if node_of is None else np.asarray(node_of, dtype=np.int64)
    direct, relay = _route(overlaps, nodes)
    remote = direct.select(np.flatnonzero(direct.source != direct.target))
    local = direct.select(np.flatnonzero(direct.source == direct.target))
    return Plan(len(train), names, sizes, remote, relay, local, _digest(names, sizes, direct, relay))


def make_rank_plan(train: Layouts, rollout: Layouts, itemsize: Callable[[str], int], rank: int) -> RankPlan:
    """What `make_plan` gives one rank, in time and memory that do not grow with everybody's transfers.

    Where FSDP2 shards over 256 ranks, a plan has tens of millions of transfers. Most are of regions that one rank alone
    owns: who sends those is no question, and between whom how much travels follows from which ranks need a region.
    """
    numbers: dict[str, int] = {}
    owners, needs = _holders(train, numbers), _holders(rollout, numbers)
    names, world_size = tuple(numbers), len(train)
    sizes = np.array([itemsize(name) for name in names], dtype=np.int64)
    _check_disjoint(owners, names)
    overlaps = _overlaps(needs, owners, sizes)
    _check_complete(overlaps, names)
    alone = owners.count[overlaps.owner] == 1
    lone = overlaps.select(np.flatnonzero(alone))
    turns, _ = _route(overlaps.select(np.flatnonzero(~alone)), np.zeros(world_size, dtype=np.int64))
    own = turns.select(np.flatnonzero((turns.source == rank) | (turns.target == rank)))
    single = _lone_transfers(lone, rank)
    own = _in_order(_joined(own, single), sizes)
    traffic = turns.between(world_size)
    traffic += _lone_traffic(lone, world_size)
    widest = int((_widths(overlaps.bounds) * sizes[owners.name[overlaps.owner]]).max(initial=0))
    digest = hashlib.sha256("\n".join(names).encode())
    for side in (owners, needs):
        for field in fields(side):
            digest.update(getattr(side, field.name).tobytes())
    digest.update(sizes.tobytes())
    return RankPlan(
        remote=own.select(np.flatnonzero(own.source != own.target)),
        local=own.select(np.flatnonzero(own.source == own.target)),
        traffic=traffic,
        widest_row=widest,
        digest=digest.hexdigest(),
    )


def _lone_traffic(lone: _Overlaps, world_size: int) -> np.ndarray:
    """Bytes by source and target of regions with one owner. Ranks that need the same regions are counted as one."""
    needs, owners = lone.needs, lone.owners
    kinds = _owner_sets(needs)
    count = int(kinds.max(initial=-1)) + 1
    source = owners.rank[owners.first[lone.owner]]
    by_kind = np.bincount(source * count + kinds[lone.need], lone.bytes, world_size * count).astype(np.int64)
    by_kind = by_kind.reshape(world_size, count)
    traffic = np.zeros((world_size, world_size), dtype=np.int64)
    _, examples = np.unique(kinds, return_index=True)
    for kind, region in enumerate(examples.tolist()):
        for target in needs.rank[needs.first[region] : needs.first[region + 1]].tolist():
            traffic[:, target] += by_kind[:, kind]
    return traffic


def _lone_transfers(lone: _Overlaps, rank: int) -> Transfers:
    """The transfers from and to one rank of regions with one owner."""
    needs, owners, need, owner, bounds = lone.needs, lone.owners, lone.need, lone.owner, lone.bounds
    source = owners.rank[owners.first[owner]]
    sent = np.flatnonzero(source == rank)
    pair = np.repeat(sent, needs.count[need[sent]])
    slot = np.repeat(needs.first[need[sent]], needs.count[need[sent]]) + _positions(needs.count[need[sent]])
    slots = np.flatnonzero(needs.rank == rank)
    into = np.searchsorted(needs.first, slots, "right") - 1
    others = np.flatnonzero(source != rank)
    received, entry = _pairs(need[others], into)
    pair, slot = np.r_[pair, others[received]], np.r_[slot, slots[entry]]
    entries = owners.first[owner[pair]]
    name = owners.name[owner[pair]]
    return Transfers(
        source[pair],
        needs.rank[slot],
        owners.shard[entries],
        needs.shard[slot],
        name,
        bounds[pair],
        _volume(bounds[pair]) * lone.sizes[name],
    )


def _joined(one: Transfers, other: Transfers) -> Transfers:
    columns = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return Transfers(*(np.concatenate(pair) for pair in columns))


def _in_order(transfers: Transfers, sizes: np.ndarray) -> Transfers:
    """In the order in which pairs of ranks stream them, wide elements first: each is aligned to its own size."""
    bounds, name = transfers.bounds, transfers.name
    return transfers.select(np.lexsort((transfers.target_shard, bounds[:, 2], bounds[:, 0], name, -sizes[name])))


def _holders(layouts: Layouts, numbers: dict[str, int]) -> _Holders:
    """Group the shards of all ranks by region. Layouts share shard objects, so each object is read only once.

    Rank 0 holds the upper half of `w`, ranks 1 and 2 the lower: two regions, with the holders `rank[0:1]`, `rank[1:3]`.

    >>> upper, lower = Shard("w", ((0, 2), (0, 3)), "w"), Shard("w", ((2, 4), (0, 3)), "w")
    >>> held = _holders([[upper], [lower], [lower]], {})
    >>> held.bounds.tolist(), held.first.tolist(), held.rank.tolist()
    ([[0, 2, 0, 3], [2, 4, 0, 3]], [0, 1, 3], [0, 1, 2])
    """
    flat = list(chain.from_iterable(layouts))
    counts = np.array([len(shards) for shards in layouts], dtype=np.int64)
    rank, shard = np.repeat(np.arange(len(layouts)), counts), _positions(counts)
    objects = np.fromiter(map(id, flat), dtype=np.int64, count=len(flat))
    _, first_seen, number = np.unique(objects, return_index=True, return_inverse=True)
    # Names are numbered in the order of the layouts, which is the same on every rank, unlike addresses of objects.
    content = [_region(flat[position], numbers) for position in np.sort(first_seen).tolist()]
    table = np.array(content, dtype=np.int64).reshape(-1, 5)
    row = np.argsort(np.argsort(first_seen))[number.reshape(-1)]
    kept = np.flatnonzero(table[row, 0] >= 0)
    distinct, inverse = _distinct_rows(table)
    region = inverse[row[kept]]
    order = kept[np.argsort(region, kind="stable")]
    padding_rows = int(np.searchsorted(distinct[:, 0], 0))
    held = np.bincount(region, minlength=len(distinct))[padding_rows:]
    first = np.concatenate([[0], np.cumsum(held)])
    return _Holders(distinct[padding_rows:, 0], distinct[padding_rows:, 1:], first, rank[order], shard[order])


def _distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows in ascending order, and which of them each row is.

    >>> distinct, number = _distinct_rows(np.array([[2, 0], [1, 5], [2, 0]]))
    >>> distinct.tolist(), number.tolist()
    ([[1, 5], [2, 0]], [1, 0, 1])
    """
    order = np.lexsort(table.T[::-1])
    ascending = table[order]
    begins = np.r_[True, (ascending[1:] != ascending[:-1]).any(axis=1)][: len(table)]
    inverse = np.empty(len(table), dtype=np.int64)
    inverse[order] = np.cumsum(begins) - 1
    return ascending[begins], inverse


def _region(shard: Shard, numbers: dict[str, int]) -> tuple[int, int, int, int, int]:
    if shard.hf_name == PADDING:
        return -1, 0, 0, 0, 0
    if len(shard.bounds) > 2:
        raise LayoutError(f"{shard.hf_name}: only vectors and matrices are planned, not {len(shard.bounds)} dimensions")
    (row_start, row_stop), (start, stop) = shard.bounds if len(shard.bounds) == 2 else (*shard.bounds, (0, 1))
    return numbers.setdefault(shard.hf_name, len(numbers)), row_start, row_stop, start, stop


def _pairs(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of positions with equal entries. `right` ascends.

    >>> [side.tolist() for side in _pairs(np.array([3, 5, 7]), np.array([3, 5, 5]))]
    [[0, 1, 1], [0, 1, 2]]
    """
    begin = np.searchsorted(right, left, "left")
    count = np.searchsorted(right, left, "right") - begin
    return np.repeat(np.arange(len(left)), count), np.repeat(begin, count) + _positions(count)


def _intersection(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    starts, stops = np.maximum(left[:, 0::2], right[:, 0::2]), np.minimum(left[:, 1::2], right[:, 1::2])
    return np.stack([starts[:, 0], stops[:, 0], starts[:, 1], stops[:, 1]], axis=1)


def _volume(bounds: np.ndarray) -> np.ndarray:
    return np.maximum(bounds[:, 1] - bounds[:, 0], 0) * np.maximum(bounds[:, 3] - bounds[:, 2], 0)


def _widths(bounds: np.ndarray) -> np.ndarray:
    return bounds[:, 3] - bounds[:, 2]


def _overlaps(needs: _Holders, owners: _Holders, sizes: np.ndarray) -> _Overlaps:
    need, owner = _pairs(needs.name, owners.name)
    bounds = _intersection(needs.bounds[need], owners.bounds[owner])
    real = np.flatnonzero(_volume(bounds))
    return _Overlaps(needs, owners, need[real], owner[real], bounds[real], sizes)


def _check_disjoint(owners: _Holders, names: tuple[str, ...]) -> None:
    neighbours = np.arange(1, len(owners.name))
    neighbours = neighbours[owners.name[neighbours - 1] == owners.name[neighbours]]
    grid = np.flatnonzero(_cut_in_both(owners))
    left, right = _pairs(owners.name[grid], owners.name[grid])
    ordered = left < right
    left = np.r_[neighbours - 1, grid[left[ordered]]]
    right = np.r_[neighbours, grid[right[ordered]]]
    wrong = np.flatnonzero(_volume(_intersection(owners.bounds[left], owners.bounds[right])))
    if len(wrong):
        region = left[wrong[0]]
        raise LayoutError(f"{names[owners.name[region]]}: training ranks hold overlapping but different regions")


def _cut_in_both(owners: _Holders) -> np.ndarray:
    """For each region, whether those of its tensor differ in rows and in columns.

    Where they differ in one of both, they are intervals in ascending order, of which neighbours overlap if any do.
    """
    if not len(owners.name):
        return np.zeros(0, dtype=bool)
    begins = np.flatnonzero(np.r_[True, owners.name[1:] != owners.name[:-1]])
    varies = np.maximum.reduceat(owners.bounds, begins) != np.minimum.reduceat(owners.bounds, begins)
    both = varies[:, :2].any(axis=1) & varies[:, 2:].any(axis=1)
    return np.repeat(both, np.diff(np.r_[begins, len(owners.name)]))


def _check_complete(overlaps: _Overlaps, names: tuple[str, ...]) -> None:
    needs = overlaps.needs
    covered = np.bincount(overlaps.need, _volume(overlaps.bounds), len(needs.name)).astype(np.int64)
    wrong = np.flatnonzero(covered != _volume(needs.bounds))
    if len(wrong):
        region = wrong[0]
        raise LayoutError(
            f"{names[needs.name[region]]}: no training rank holds all of the region {needs.bounds[region].tolist()} "
            f"that rollout rank {needs.rank[needs.first[region]]} needs"
        )


def _route(overlaps: _Overlaps, nodes: np.ndarray) -> tuple[Transfers, Transfers]:
    """Give every receiver of every overlap its source: transfers out of training weights, and relays.

    Two ranks train with half of the rows of `w` each and both serve all of them. There are two overlaps, one with each
    half, and two receivers of each: `pair` is 0 0 1 1, `target` 0 1 0 1, `region` 0 0 1 1. The first and the last
    receiver own what they need and copy it, the others get it from the rank that does:

    >>> upper, lower = Shard("w", ((0, 2), (0, 3)), "w"), Shard("w", ((2, 4), (0, 3)), "w")
    >>> whole = Shard("w", ((0, 4), (0, 3)), "w")
    >>> plan = make_plan([[upper], [lower]], [[whole], [whole]], lambda name: 4)
    >>> for leg in plan.local, plan.remote:
    ...     print(leg.source.tolist(), leg.target.tolist(), leg.bounds.tolist(), leg.bytes.tolist())
    [0, 1] [0, 1] [[0, 2, 0, 3], [2, 4, 0, 3]] [24, 24]
    [0, 1] [1, 0] [[0, 2, 0, 3], [2, 4, 0, 3]] [24, 24]
    """
    needs, owners, need, owner, bounds = (
        overlaps.needs, overlaps.owners, overlaps.need, overlaps.owner, overlaps.bounds
    )  # fmt: skip
    count = needs.count[need]
    pair = np.repeat(np.arange(len(need)), count)
    slot = np.repeat(needs.first[need], count) + _positions(count)
    target, region = needs.rank[slot], owner[pair]
    chosen = _own_holding(owners, len(nodes), region, target)
    # Turns go on over all overlaps that share a set of owners, so that remainders do not pile up on the first owner.
    owner_set = _owner_sets(owners)[region]
    remote = np.flatnonzero(chosen < 0)
    chosen[remote] = _holding_in_node(owners, nodes, region[remote], nodes[target[remote]], owner_set[remote])
    outside = np.flatnonzero(chosen < 0)
    volume = overlaps.bytes
    entry = _node_entries(pair[outside], nodes[target[outside]], target[outside], volume[pair[outside]], len(nodes))
    entering = outside[entry == np.arange(len(outside))]
    chosen[entering] = owners.first[region[entering]] + (
        _ordinals(owner_set[entering]) % owners.count[region[entering]]
    )
    relayed = np.flatnonzero(chosen < 0)
    source = outside[entry[np.searchsorted(outside, relayed)]]

    def columns(rows: np.ndarray, ranks: np.ndarray, shards: np.ndarray) -> Transfers:
        name = owners.name[region[rows]]
        made = Transfers(
            ranks, target[rows], shards, needs.shard[slot[rows]], name, bounds[pair[rows]], volume[pair[rows]]
        )
        return _in_order(made, overlaps.sizes)

    direct = np.flatnonzero(chosen >= 0)
    return (
        columns(direct, owners.rank[chosen[direct]], owners.shard[chosen[direct]]),
        columns(relayed, target[source], needs.shard[slot[source]]),
    )


def _positions(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... inside every run, for runs of these lengths.

    >>> _positions(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _ordinals(keys: np.ndarray) -> np.ndarray:
    """Number the occurrences of every key 0, 1, 2, ... in order.

    >>> _ordinals(np.array([7, 5, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(keys, kind="stable")
    _, counts = np.unique(keys, return_counts=True)
    ordinals = np.empty(len(keys), dtype=np.int64)
    ordinals[order] = _positions(counts)
    return ordinals


def _own_holding(owners: _Holders, world_size: int, region: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The entry of `owners` by which `rank` holds `region` itself, or -1."""
    keys = np.repeat(np.arange(len(owners.name)), owners.count) * world_size + owners.rank
    position = np.minimum(np.searchsorted(keys, region * world_size + rank), len(keys) - 1)
    return np.where(keys[position] == region * world_size + rank, position, -1)


def _owner_sets(owners: _Holders) -> np.ndarray:
    """A number for every region, the same for regions with the same owners."""
    sets: dict[bytes, int] = {}
    edges = zip(owners.first[:-1], owners.first[1:], strict=True)
    numbers = [sets.setdefault(owners.rank[start:stop].tobytes(), len(sets)) for start, stop in edges]
    return np.array(numbers, dtype=np.int64)


def _holding_in_node(
    owners: _Holders, nodes: np.ndarray, region: np.ndarray, node: np.ndarray, owner_set: np.ndarray
) -> np.ndarray:
    """An entry of `owners` for each receiver, from its own node and in turns, or -1 where the node has none."""
    width = int(nodes.max()) + 1
    held = np.repeat(np.arange(len(owners.name)), owners.count) * width + nodes[owners.rank]
    order = np.argsort(held, kind="stable")
    first = np.searchsorted(held[order], region * width + node, "left")
    count = np.searchsorted(held[order], region * width + node, "right") - first
    turn = _ordinals(owner_set * width + node)
    found = np.minimum(first + turn % np.maximum(count, 1), len(order) - 1)
    return np.where(count > 0, order[found], -1)


def _node_entries(
    pair: np.ndarray, node: np.ndarray, target: np.ndarray, volume: np.ndarray, world_size: int
) -> np.ndarray:
    """For each receiver, the position of the receiver at which the region enters its node.

    Large regions are placed first, each at the member that has least to relay so far (longest processing time first).

    Ranks 2 and 3 of node 1 need two regions, rank 0 of node 0 the first one. That enters node 1 at rank 2, which then
    has 8 bytes to pass on, so that the second one enters at rank 3, the receiver at position 4:

    >>> pair, node, target = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 1, 1, 1]), np.array([0, 2, 3, 2, 3])
    >>> _node_entries(pair, node, target, np.array([8, 8, 8, 4, 4]), 4).tolist()
    [0, 1, 1, 4, 4]
    """
    order = np.lexsort((target, node, pair))
    keys = pair[order] * world_size + node[order]
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, dtype=np.int64)
    counts = np.diff(np.r_[starts, len(keys)])
    entry = np.arange(len(pair))
    load = np.zeros(world_size, dtype=np.int64)
    shared = np.flatnonzero(counts > 1)
    weights = volume[order[starts[shared]]] * (counts[shared] - 1)
    for place in np.argsort(-weights, kind="stable"):
        group = shared[place]
        members = order[starts[group] : starts[group] + counts[group]]
        best = members[np.argmin(load[target[members]])]
        load[target[best]] += weights[place]
        entry[members] = best
    return entry


def _digest(names: tuple[str, ...], sizes: np.ndarray, *legs: Transfers) -> str:
    state = hashlib.sha256("\n".join(names).encode())
    state.update(sizes.tobytes())
    for leg in legs:
        for field in fields(leg):
            state.update(np.ascontiguousarray(getattr(leg, field.name)).tobytes())
    return state.hexdigest()
