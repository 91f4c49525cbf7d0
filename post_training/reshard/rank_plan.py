"""Compute one rank's part of `make_plan`, in time and memory that do not grow with the transfers of all ranks.

If FSDP2 shards over 256 ranks, a plan has tens of millions of transfers, but few kinds of them. Regions that the same
ranks need and the same ranks own have the same receivers, in the same order. Owners take turns, so the number of
earlier receivers determines the sender.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from post_training.layouts.regions import Regions
from post_training.reshard.overlaps import (
    DistinctRanks,
    Holders,
    Overlaps,
    check_complete,
    check_disjoint,
    find_overlaps,
    pairs,
    positions,
    rank_sets,
    running,
    volume,
    widths,
)
from post_training.reshard.plan import Transfers, in_stream_order


@dataclass(frozen=True)
class RankPlan:
    """The transfers and copies of one rank, and the traffic of all.

    Attributes:
        remote, local: as in `ReshardPlan`, those from or to this rank.
        traffic: bytes by source and target of all ranks; the diagonal has the bytes that ranks copy themselves.
        widest_row: bytes of the longest row of a region.
        digest: equal on two ranks if and only if they planned from the same layouts.
    """

    remote: Transfers
    local: Transfers
    traffic: np.ndarray
    widest_row: int
    digest: str


def make_rank_plan(
    train: Sequence[Regions],
    rollout: Sequence[Regions],
    names: Sequence[str],
    itemsize: Callable[[str], int],
    rank: int,
) -> RankPlan:
    """Plan the part of one rank; all ranks must have the same layouts.

    Args:
        train, rollout: regions of all ranks.
        names: of the tensors, by number.
        itemsize: bytes of one element of a tensor, on the wire.
        rank: the rank to plan for.

    Raises:
        LayoutError: as in `make_plan`.
    """
    joined = Joined.of(train, rollout, names, itemsize)
    overlaps, turns, sizes = joined.overlaps, joined.turns, joined.overlaps.sizes
    own = in_stream_order(own_transfers(overlaps, turns, rank), sizes)
    return RankPlan(
        remote=own.select(np.flatnonzero(own.source != own.target)),
        local=own.select(np.flatnonzero(own.source == own.target)),
        traffic=_traffic(overlaps, turns, len(train)),
        widest_row=joined.widest_row,
        digest=joined.digest,
    )


@dataclass(frozen=True)
class Joined:
    """Both sides of all ranks, joined; `digest` is equal on two ranks if and only if they have the same layouts."""

    overlaps: Overlaps
    turns: "Turns"
    digest: str

    @property
    def widest_row(self) -> int:
        """Bytes of the longest row of a region."""
        overlaps = self.overlaps
        return int((widths(overlaps.bounds) * overlaps.sizes[overlaps.owners.name[overlaps.owner]]).max(initial=0))

    @classmethod
    def of(
        cls, train: Sequence[Regions], rollout: Sequence[Regions], names: Sequence[str], itemsize: Callable[[str], int]
    ) -> "Joined":
        """Join the regions of all ranks; arguments and errors are those of `make_rank_plan`."""
        held, needed = DistinctRanks.of(train), DistinctRanks.of(rollout)
        # As in `make_plan`, tensors travel in the order in which the layouts name them first.
        order = _first_seen(np.concatenate([held.rows[:, 0], needed.rows[:, 0]]), len(names))
        numbers = np.argsort(order)
        owners, needs = held.holders(numbers), needed.holders(numbers)
        ordered = tuple(names[number] for number in order.tolist())
        sizes = np.array([itemsize(name) for name in ordered], dtype=np.int64)
        check_disjoint(owners, ordered)
        overlaps = find_overlaps(needs, owners, sizes)
        check_complete(overlaps, ordered)
        digest = hashlib.sha256("\n".join(names).encode())
        for content in (held.rows, held.counts, held.kind, needed.rows, needed.counts, needed.kind, sizes):
            digest.update(content.tobytes())
        return cls(overlaps, Turns.of(overlaps, len(train)), digest.hexdigest())


def _first_seen(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return 0 to count - 1 in the order of their first occurrence in `numbers`, then those that do not occur.

    >>> _first_seen(np.array([2, -1, 1, 2]), 4).tolist()
    [2, 1, 0, 3]
    """
    seen = numbers[numbers >= 0]
    first = np.full(count, len(seen))
    np.minimum.at(first, seen, np.arange(len(seen)))
    return np.argsort(first, kind="stable")


@dataclass(frozen=True)
class Turns:
    """The receivers of the overlaps, and the turns of their senders.

    Overlaps are of one kind if the same ranks need them and the same ranks own them. For each kind, the arrays `target`
    to `before` have one entry for each rank that needs it; those of kind k begin at `begin[k]`.

    Attributes:
        kind: of each overlap.
        turn: for each overlap, which of its owners sends to the first receiver.
        need, owner: for each kind, the regions of an example.
        target: a rank that needs the region.
        own: whether it owns the region, and receives nothing.
        before: number of receivers before it.
        receivers: positions of the entries that are not owners.
        first, count: for each kind, its first one in `receivers`, and how many it has.
    """

    kind: np.ndarray
    turn: np.ndarray
    need: np.ndarray
    owner: np.ndarray
    begin: np.ndarray
    target: np.ndarray
    own: np.ndarray
    before: np.ndarray
    receivers: np.ndarray
    first: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, overlaps: Overlaps, world_size: int) -> "Turns":
        needs, owners = overlaps.needs, overlaps.owners
        needing, owning = rank_sets(needs)[overlaps.need], rank_sets(owners)[overlaps.owner]
        keys = needing * (int(owning.max(initial=0)) + 1) + owning
        _, examples, kind = np.unique(keys, return_index=True, return_inverse=True)
        need, owner = overlaps.need[examples], overlaps.owner[examples]
        entry, of_kind = _entries(needs, need)
        target = needs.rank[entry]
        owned = np.zeros(len(examples) * world_size, dtype=bool)
        holder, of_owner = _entries(owners, owner)
        owned[of_owner * world_size + owners.rank[holder]] = True
        own = owned[of_kind * world_size + target]
        count = np.bincount(of_kind[~own], minlength=len(examples))
        first = np.cumsum(count) - count
        # Turns continue over all overlaps that share a set of owners: remainders do not pile up on the first owner.
        turn = np.zeros(len(kind), dtype=np.int64)
        several = np.flatnonzero(owners.count[overlaps.owner] > 1)
        turn[several] = running(owning[several], count[kind[several]]) % owners.count[overlaps.owner[several]]
        size = needs.count[need]
        return cls(
            kind=kind,
            turn=turn,
            need=need,
            owner=owner,
            begin=np.cumsum(size) - size,
            target=target,
            own=own,
            before=np.cumsum(~own) - ~own - first[of_kind],
            receivers=np.flatnonzero(~own),
            first=first,
            count=count,
        )


def _entries(held: Holders, regions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of these regions, one region after the other, and the position of each one's region."""
    count = held.count[regions]
    return np.repeat(held.first[regions], count) + positions(count), np.repeat(np.arange(len(regions)), count)


def _traffic(overlaps: Overlaps, turns: Turns, world_size: int) -> np.ndarray:
    """Return bytes by source and target. Overlaps of one kind and turn have the same senders, so they are summed."""
    owners = overlaps.owners
    most = int(owners.count.max(initial=1))
    by_turn = np.bincount(turns.kind * most + turns.turn, overlaps.bytes, len(turns.count) * most)
    group = np.flatnonzero(by_turn)
    kind, turn = group // most, group % most
    place = positions(turns.count[kind])
    kind, turn, size = (np.repeat(each, turns.count[kind]) for each in (kind, turn, by_turn[group]))
    owner = turns.owner[kind]
    source = owners.rank[owners.first[owner] + (turn + place) % owners.count[owner]]
    target = turns.target[turns.receivers[turns.first[kind] + place]]
    moved = np.bincount(source * world_size + target, size, world_size**2).reshape(world_size, world_size)
    kept = np.repeat(by_turn.reshape(-1, most).sum(1), overlaps.needs.count[turns.need])
    stays = np.bincount(turns.target[turns.own], kept[turns.own], world_size)
    return (moved + np.diag(stays)).astype(np.int64)


def own_transfers(overlaps: Overlaps, turns: Turns, rank: int) -> Transfers:
    """Return the transfers from and to one rank."""
    needs, owners = overlaps.needs, overlaps.owners
    sent, place, own_entry = _with_entries(owners, overlaps.owner, rank)
    kind, count = turns.kind[sent], owners.count[overlaps.owner[sent]]
    first = (place - turns.turn[sent]) % count
    times = np.maximum(-((first - turns.count[kind]) // count), 0)
    receiver = np.repeat(turns.first[kind] + first, times) + np.repeat(count, times) * positions(times)
    sent, source, kind = np.repeat(sent, times), np.repeat(own_entry, times), np.repeat(kind, times)
    target = needs.first[overlaps.need[sent]] + turns.receivers[receiver] - turns.begin[kind]
    got, place, entry = _with_entries(needs, overlaps.need, rank)
    at = turns.begin[turns.kind[got]] + place
    owner = overlaps.owner[got]
    other = owners.first[owner] + (turns.turn[got] + turns.before[at]) % owners.count[owner]
    held = np.flatnonzero(owners.rank == rank)
    itself = np.searchsorted(held, owners.first[owner])  # the first of its entries for this region
    given = np.where(turns.own[at], held[np.minimum(itself, len(held) - 1)] if len(held) else other, other)
    pair, source, target = np.r_[sent, got], np.r_[source, given], np.r_[target, entry]
    name, bounds = owners.name[overlaps.owner[pair]], overlaps.bounds[pair]
    return Transfers(
        owners.rank[source],
        needs.rank[target],
        owners.shard[source],
        needs.shard[target],
        name,
        bounds,
        volume(bounds) * overlaps.sizes[name],
    )


def _with_entries(held: Holders, regions: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the overlaps, given by their regions on one side, of which a rank holds the region.

    Each comes with the rank's place among the holders of the region, and with its entry.
    """
    entries = np.flatnonzero(held.rank == rank)
    region = np.searchsorted(held.first, entries, "right") - 1
    mine = np.zeros(len(held.name), dtype=bool)
    mine[region] = True
    chosen = np.flatnonzero(mine[regions])
    at, own = pairs(regions[chosen], region)
    return chosen[at], entries[own] - held.first[region[own]], entries[own]
