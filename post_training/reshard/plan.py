"""Plan transfers from two layouts: which region of which tensor goes from which rank to which rank.

The plan is a pure function of the layouts, so every rank computes the same one without communication; it is built from
numpy arrays because 256 ranks of DeepSeek-V3 hold a third of a million shards.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from post_training.reshard.overlaps import (
    Holders,
    LayoutError,
    Layouts,
    Overlaps,
    check_complete,
    check_disjoint,
    find_overlaps,
    holders,
    positions,
    rank_sets,
    running,
)


@dataclass(frozen=True)
class Transfers:
    """Transfers as columns, with one entry per transfer.

    Attributes:
        source, target: ranks.
        source_shard, target_shard: positions in the layouts of those ranks.
        name: number of the HF tensor.
        bounds: its region (row start, row stop, column start, column stop); a vector has the single column 0:1.
        bytes: on the wire.
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
        """Return the transfers selected by a mask or an array of positions."""
        return Transfers(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def between(self, world_size: int) -> np.ndarray:
        """Return bytes by source and target: an array (world_size, world_size) of int64."""
        pairs = self.source * world_size + self.target
        return np.bincount(pairs, self.bytes, world_size**2).astype(np.int64).reshape(world_size, world_size)


@dataclass(frozen=True)
class ReshardPlan:
    """The transfers and copies of all ranks.

    Attributes:
        names: HF tensors by number.
        itemsize: bytes of one element of each, on the wire.
        remote: transfers between ranks out of training weights, in the order in which each pair of ranks streams them.
        relay: transfers that follow, inside a node, out of rollout weights that have arrived; `source_shard` is a
            position in the rollout layout. Empty if all ranks are in one node.
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


def make_plan(
    train: Layouts, rollout: Layouts, itemsize: Callable[[str], int], node_of: Sequence[int] | None = None
) -> ReshardPlan:
    """Plan the transfers that give every rollout shard its content.

    A rank that holds a region itself copies it. Otherwise an owner in its node sends it, and owners take turns. A
    region that no rank of a node holds enters it once, at the receiver with the least to pass on, which relays it.

    Args:
        train, rollout: layouts of all ranks.
        itemsize: bytes of one element of an HF tensor, on the wire.
        node_of: the node of every rank, numbered from 0; None means that all are in one.

    Raises:
        LayoutError: training shards overlap without being equal, or a rollout shard has no complete source.
    """
    if len(train) != len(rollout):
        raise LayoutError(f"{len(train)} training ranks do not match {len(rollout)} rollout ranks")
    numbers: dict[str, int] = {}
    owners, needs = holders(train, numbers), holders(rollout, numbers)
    names = tuple(numbers)
    sizes = np.array([itemsize(name) for name in names], dtype=np.int64)
    check_disjoint(owners, names)
    overlaps = find_overlaps(needs, owners, sizes)
    check_complete(overlaps, names)
    nodes = np.zeros(len(train), dtype=np.int64) if node_of is None else np.asarray(node_of, dtype=np.int64)
    direct, relay = _route(overlaps, nodes)
    remote = direct.select(np.flatnonzero(direct.source != direct.target))
    local = direct.select(np.flatnonzero(direct.source == direct.target))
    return ReshardPlan(len(train), names, sizes, remote, relay, local, _digest(names, sizes, direct, relay))


def in_stream_order(transfers: Transfers, sizes: np.ndarray) -> Transfers:
    """Sort transfers as pairs of ranks stream them, wide elements first: each is then aligned to its own size."""
    bounds, name = transfers.bounds, transfers.name
    return transfers.select(np.lexsort((transfers.target_shard, bounds[:, 2], bounds[:, 0], name, -sizes[name])))


def _route(overlaps: Overlaps, nodes: np.ndarray) -> tuple[Transfers, Transfers]:
    """Give every receiver of every overlap its source; return transfers out of training weights, and relays.

    Two ranks train half of the rows of `w` each and both serve all of them. There are two overlaps, one with each half,
    and two receivers of each: `pair` is 0 0 1 1, `target` 0 1 0 1, `region` 0 0 1 1. The first and the last receiver
    own the region that they need and copy it, the others receive it from its owner:

    >>> from post_training.layouts.layout import Shard
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
    slot = np.repeat(needs.first[need], count) + positions(count)
    target, region = needs.rank[slot], owner[pair]
    chosen = _own_holding(owners, len(nodes), region, target)
    # Turns continue over all overlaps that share a set of owners, so that remainders do not pile up on the first owner.
    owner_set = rank_sets(owners)[region]
    remote = np.flatnonzero(chosen < 0)
    chosen[remote] = _holding_in_node(owners, nodes, region[remote], nodes[target[remote]], owner_set[remote])
    outside = np.flatnonzero(chosen < 0)
    volume = overlaps.bytes
    entry = _node_entries(pair[outside], nodes[target[outside]], target[outside], volume[pair[outside]], len(nodes))
    entering = outside[entry == np.arange(len(outside))]
    turn = running(owner_set[entering], np.ones_like(entering))
    chosen[entering] = owners.first[region[entering]] + turn % owners.count[region[entering]]
    relayed = np.flatnonzero(chosen < 0)
    source = outside[entry[np.searchsorted(outside, relayed)]]

    def columns(rows: np.ndarray, ranks: np.ndarray, shards: np.ndarray) -> Transfers:
        name = owners.name[region[rows]]
        made = Transfers(
            ranks, target[rows], shards, needs.shard[slot[rows]], name, bounds[pair[rows]], volume[pair[rows]]
        )
        return in_stream_order(made, overlaps.sizes)

    direct = np.flatnonzero(chosen >= 0)
    return (
        columns(direct, owners.rank[chosen[direct]], owners.shard[chosen[direct]]),
        columns(relayed, target[source], needs.shard[slot[source]]),
    )


def _own_holding(owners: Holders, world_size: int, region: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the entry of `owners` by which `rank` holds `region` itself, or -1."""
    keys = np.repeat(np.arange(len(owners.name)), owners.count) * world_size + owners.rank
    position = np.minimum(np.searchsorted(keys, region * world_size + rank), len(keys) - 1)
    return np.where(keys[position] == region * world_size + rank, position, -1)


def _holding_in_node(
    owners: Holders, nodes: np.ndarray, region: np.ndarray, node: np.ndarray, owner_set: np.ndarray
) -> np.ndarray:
    """Return for each receiver an entry of `owners` in its own node, in turns, or -1 if the node has none."""
    width = int(nodes.max()) + 1
    held = np.repeat(np.arange(len(owners.name)), owners.count) * width + nodes[owners.rank]
    order = np.argsort(held, kind="stable")
    first = np.searchsorted(held[order], region * width + node, "left")
    count = np.searchsorted(held[order], region * width + node, "right") - first
    turn = running(owner_set * width + node, np.ones_like(node))
    found = np.minimum(first + turn % np.maximum(count, 1), len(order) - 1)
    return np.where(count > 0, order[found], -1)


def _node_entries(
    pair: np.ndarray, node: np.ndarray, target: np.ndarray, volume: np.ndarray, world_size: int
) -> np.ndarray:
    """Return for each receiver the position of the receiver at which the region enters its node.

    Large regions are placed first, each at the member that has least to relay so far (longest processing time first).

    Ranks 2 and 3 of node 1 need two regions, rank 0 of node 0 the first one. It enters node 1 at rank 2, which then has
    8 bytes to pass on, so the second one enters at rank 3, the receiver at position 4:

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
