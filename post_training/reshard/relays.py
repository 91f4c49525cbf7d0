"""Plans a hierarchical transfer for one rank: a region that many ranks of a node need enters the node once.

The rollout ranks of a node need the same weights, except for experts. If each of them received a region directly, it
would cross the links between nodes once per rank, and only the ranks that own a layer could send it. So a region that
no rank of a node owns enters the node at one of its receivers. This receiver forwards it in the next bucket, straight
from the memory in which it arrived, so forwarding takes one more bucket and no memory.

All regions with the same receivers and the same owners form a line of bytes. A line is cut into equal units, as many
for each receiver of a node, where they enter, and each unit into one part per bucket. Every rank cuts lines the same
way, so a rank only computes the lines that it takes part in.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from post_training.reshard.overlaps import Overlaps, positions, rank_sets, running, widths
from post_training.reshard.plan import Transfers, in_stream_order
from post_training.reshard.rank_plan import Joined, Turns, own_transfers
from post_training.reshard.schedule import (
    ALIGNMENT,
    Bucket,
    BucketError,
    ChunkTable,
    Direction,
    cut_streams,
    equal_streams,
)

_DIRECT, _ENTERING, _PASSED_ON = range(3)
"""The kinds of bytes that a rank sends to another one in a bucket, in this order."""


@dataclass(frozen=True)
class Load:
    """Bytes and streams that a rank stages in all buckets, in the direction in which it stages more.

    Each stream is cut at whole rows, independently of the others.

    Attributes:
        bytes: staged in all buckets together.
        streams: into which they are divided.
        widest_row: bytes of the longest row.
    """

    bytes: int
    streams: int
    widest_row: int

    def buckets(self, bucket_bytes: int) -> int:
        """Return the smallest number of buckets with which staging stays within `bucket_bytes`.

        Raises:
            BucketError: a bucket cannot hold a row of each stream.
        """
        available = bucket_bytes - self.streams * (self.widest_row + ALIGNMENT)
        if self.bytes and available <= 0:
            raise BucketError(bucket_bytes, self.streams, self.widest_row)
        return -(-self.bytes // available) if self.bytes else 0


@dataclass(frozen=True)
class _Groups:
    """Groups of receivers: those in one node that need the regions of one kind, see `Turns`.

    Attributes:
        kind: kind of each group's regions.
        first, count: each group's slice of `member`.
        member: positions of the receivers in `Turns.target`, group by group.
        owner, owners: start and length of each group's slice of `near`.
        near: places of the owners in the group's node, counted among all owners of the kind.
    """

    kind: np.ndarray
    first: np.ndarray
    count: np.ndarray
    member: np.ndarray
    owner: np.ndarray
    owners: np.ndarray
    near: np.ndarray

    @classmethod
    def of(cls, overlaps: Overlaps, turns: Turns, nodes: np.ndarray) -> "_Groups":
        width = int(nodes.max(initial=0)) + 1
        key = np.repeat(np.arange(len(turns.count)), turns.count) * width + nodes[turns.target[turns.receivers]]
        order = np.argsort(key, kind="stable")
        keys, first, count = np.unique(key[order], return_index=True, return_counts=True)
        owned = overlaps.owners.count[turns.owner]
        entry = np.repeat(overlaps.owners.first[turns.owner], owned) + positions(owned)
        held = np.repeat(np.arange(len(owned)), owned) * width + nodes[overlaps.owners.rank[entry]]
        near = np.argsort(held, kind="stable")
        owner = np.asarray(np.searchsorted(held[near], keys, "left"))
        owners = np.asarray(np.searchsorted(held[near], keys, "right")) - owner
        member = turns.receivers[order]
        return cls(keys // width, first, count, member, owner, owners, positions(owned)[near])

    @property
    def shared(self) -> np.ndarray:
        """Whether the regions of each group enter its node once and are forwarded."""
        return (self.owners == 0) & (self.count > 1)

    def members(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the members of these groups in order: group, number within it, and position in `member`."""
        count = self.count[groups]
        number = positions(count)
        return np.repeat(groups, count), number, np.repeat(self.first[groups], count) + number


@dataclass(frozen=True)
class _Units:
    """The units that this rank sends or that enter its node for it. Arrays with an entry for each unit.

    Attributes:
        group: the group that receives the unit.
        place: number, within the group, of the receiver at which the unit enters the node.
        line, part: the line that the unit is cut from, and its number there.
        source, target: ranks that send and receive the unit as it enters the node.
    """

    group: np.ndarray
    place: np.ndarray
    line: np.ndarray
    part: np.ndarray
    source: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class _Pieces:
    """Rows of overlaps in buckets. Arrays with an entry for each piece.

    Attributes:
        bucket, peer: the bucket in which the piece travels, and the rank at the other end.
        area: `_DIRECT`, `_ENTERING` or `_PASSED_ON`.
        order: columns by which the pieces of an area are sorted.
        shard: this rank's shard; -1 if the piece is forwarded.
        bounds: as in `Transfers`.
        bytes: size of the piece.
        unit: number that connects a received piece with those forwarded from it; -1 for direct pieces and for those
            that this rank sends from its own weights.
    """

    bucket: np.ndarray
    peer: np.ndarray
    area: np.ndarray
    order: np.ndarray
    shard: np.ndarray
    bounds: np.ndarray
    bytes: np.ndarray
    unit: np.ndarray

    @classmethod
    def join(cls, parts: Sequence["_Pieces"]) -> "_Pieces":
        return cls(*(np.concatenate(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True)))


class RelayedPlan:
    """The part that one rank has in a reshard: its sends, receives, forwards and local copies.

    Attributes:
        local: transfers inside the rank, as in `ReshardPlan`.
        load: the rank's load, from which the number of buckets follows.
        digest: equal on two ranks if and only if they planned from the same layouts and nodes.

    Args:
        joined: both sides of all ranks.
        rank: this rank.
        nodes: node of every rank, numbered from 0.
    """

    def __init__(self, joined: Joined, rank: int, nodes: np.ndarray) -> None:
        self._joined, self._overlaps, self._turns, self._rank = joined, joined.overlaps, joined.turns, rank
        self._world_size = len(nodes)
        self._groups = _Groups.of(self._overlaps, self._turns, nodes)
        overlaps, kind = self._overlaps, self._turns.kind
        name, bounds = overlaps.owners.name[overlaps.owner], overlaps.bounds
        self._order = np.lexsort((bounds[:, 2], bounds[:, 0], name, -overlaps.sizes[name], kind))
        self._begin = np.searchsorted(kind[self._order], np.arange(len(self._turns.count) + 1))
        self._edges = np.append(0, np.cumsum(overlaps.bytes[self._order]))
        self._owning = rank_sets(overlaps.owners)[overlaps.owner]
        own = own_transfers(overlaps, self._turns, rank)
        self.local = in_stream_order(own.select(np.flatnonzero(own.source == own.target)), overlaps.sizes)
        self._direct = in_stream_order(self._direct_transfers(), overlaps.sizes)
        self._line_kind, self._line_parts, self._units = self._own_units()
        self.load = self._load()
        self.digest = hashlib.sha256(joined.digest.encode() + nodes.tobytes()).hexdigest()

    @property
    def passes_on(self) -> bool:
        """Whether any rank forwards. There is then one bucket more than lines are cut into."""
        return bool(self._groups.shared.any())

    def _owner_place(self, kinds: np.ndarray) -> np.ndarray:
        """Return the place of this rank among the owners of each kind, or -1."""
        owners, region = self._overlaps.owners, self._turns.owner[kinds]
        count = owners.count[region]
        found = owners.rank[np.repeat(owners.first[region], count) + positions(count)] == self._rank
        place = np.full(len(kinds), -1)
        which = np.flatnonzero(found)
        place[np.repeat(np.arange(len(kinds)), count)[which]] = positions(count)[which]
        return place

    def _direct_transfers(self) -> Transfers:
        """Return the direct transfers from or to this rank: inside a node, or to a node with one receiver."""
        groups, turns, overlaps = self._groups, self._turns, self._overlaps
        single = (groups.owners == 0) & (groups.count == 1)
        singles = np.bincount(groups.kind[single], minlength=len(turns.count))
        number = np.zeros_like(groups.kind)  # of a single group among those of its kind
        number[single] = running(groups.kind[single], np.ones_like(groups.kind[single]))
        group, member, at = groups.members(np.flatnonzero(single | (groups.owners > 0)))
        kind, target = groups.kind[group], turns.target[groups.member[at]]
        owned = self._owner_place(np.arange(len(turns.count)))[kind] >= 0
        of_rank = np.flatnonzero(owned | (target == self._rank))
        group, member, at, kind = group[of_rank], member[of_rank], at[of_rank], kind[of_rank]
        size = self._begin[kind + 1] - self._begin[kind]
        entry = np.repeat(np.arange(len(kind)), size)
        overlap = self._order[self._begin[kind][entry] + positions(size)]
        group, member, at = group[entry], member[entry], at[entry]
        earlier = running(self._owning, np.ones_like(self._owning))
        near = groups.owners[group]
        turn = (earlier[overlap] * groups.count[group] + member) % np.maximum(near, 1)
        place = np.where(
            near > 0,
            groups.near[np.minimum(groups.owner[group] + turn, len(groups.near) - 1)],
            self._far_sender(singles, overlap, number[group]),
        )
        source = overlaps.owners.first[overlaps.owner[overlap]] + place
        mine = np.flatnonzero(
            (overlaps.owners.rank[source] == self._rank) | (turns.target[groups.member[at]] == self._rank)
        )
        return self._transfers(overlap[mine], source[mine], at[mine])

    def _far_sender(self, singles: np.ndarray, overlap: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return the place of the owner that sends an overlap to a node with a single receiver.

        Owners take turns. Each receiver that an owner serves in its own node costs it a turn, so all send alike.

        Args:
            singles: number of such receivers of each kind.
            overlap: overlap of each entry.
            number: number of each entry's receiver among those of its kind. For other receivers the result is unused.
        """
        turns = self._turns
        kinds = np.flatnonzero(singles)
        senders, begin = self._far_senders(singles, kinds)
        place = np.full(len(singles), len(kinds))
        place[kinds] = np.arange(len(kinds))
        behind = running(rank_sets(self._overlaps.owners)[turns.owner], singles)
        turn = behind[turns.kind] + running(turns.kind, singles[turns.kind])
        kind = place[turns.kind[overlap]]
        size = np.append(np.diff(begin), 1)
        return np.append(senders, -1)[begin[kind] + (turn[overlap] + number) % size[kind]]

    def _far_senders(self, singles: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the owners of each of `kinds` in the order of their turns, and each kind's first one."""
        groups, owners = self._groups, self._overlaps.owners.count[self._turns.owner]
        first = np.cumsum(owners) - owners
        # Counted in receivers, over as many overlaps as a kind has owners: each owner's fair part is then `receivers`,
        # a whole number, and `near` is what it already sends inside its node.
        inside = np.flatnonzero(groups.owners > 0)
        entry = np.repeat(inside, groups.owners[inside])
        owner = groups.near[groups.owner[entry] + positions(groups.owners[inside])]
        kind = groups.kind[entry]
        near = np.bincount(first[kind] + owner, owners[kind] * groups.count[entry] / groups.owners[entry], owners.sum())
        receivers = singles + np.bincount(groups.kind[inside], groups.count[inside], len(singles)).astype(np.int64)
        chosen = np.repeat(first[kinds], owners[kinds]) + positions(owners[kinds])
        times = np.rint(np.maximum(np.repeat(receivers[kinds], owners[kinds]) - near[chosen], 0)).astype(np.int64)
        of_kind = np.repeat(np.arange(len(kinds)), owners[kinds])
        when = (positions(times) + 0.5) / np.repeat(times, times)
        order = np.lexsort((when, np.repeat(of_kind, times)))
        begin = np.append(0, np.cumsum(np.bincount(of_kind, times, len(kinds)))).astype(np.int64)
        return np.repeat(positions(owners[kinds]), times)[order], begin

    def _transfers(self, overlap: np.ndarray, source: np.ndarray, member: np.ndarray) -> Transfers:
        """Return the transfers of overlaps, each from an entry of the owners to a member of a group."""
        overlaps, target = self._overlaps, self._entry(overlap, member)
        owners, needs = overlaps.owners, overlaps.needs
        name, bounds = owners.name[overlaps.owner[overlap]], overlaps.bounds[overlap]
        return Transfers(
            owners.rank[source], needs.rank[target], owners.shard[source], needs.shard[target], name, bounds,
            overlaps.bytes[overlap],
        )  # fmt: skip

    def _entry(self, overlap: np.ndarray, member: np.ndarray) -> np.ndarray:
        """Return the entry of `needs` by which a member of a group needs an overlap of its kind."""
        kind = self._turns.kind[overlap]
        return self._overlaps.needs.first[self._overlaps.need[overlap]] + (
            self._groups.member[member] - self._turns.begin[kind]
        )

    def _own_units(self) -> tuple[np.ndarray, np.ndarray, _Units]:
        """Lines by kind and number of units, and the units that this rank has a part in.

        The owners of a kind take turns from unit to unit, and from kind to kind. A line has so many units for each
        receiver that all of its owners send as many.
        """
        groups, turns, overlaps = self._groups, self._turns, self._overlaps
        shared, kinds = np.flatnonzero(groups.shared), np.arange(len(turns.count))
        owners = overlaps.owners.count[turns.owner]
        entries = np.bincount(groups.kind[shared], groups.count[shared], len(kinds)).astype(np.int64)
        each = owners // np.gcd(np.maximum(entries, 1), owners)  # units for one receiver
        base = running(rank_sets(overlaps.owners)[turns.owner], entries * each)
        before = np.zeros_like(groups.kind)
        before[shared] = running(groups.kind[shared], groups.count[shared])
        group, number, at = groups.members(shared)
        contains = np.zeros(len(groups.kind), dtype=bool)
        contains[group[turns.target[groups.member[at]] == self._rank]] = True
        wanted = np.flatnonzero(contains[group] | (self._owner_place(kinds)[groups.kind[group]] >= 0))
        group, number, at = group[wanted], number[wanted], at[wanted]
        repeat = each[groups.kind[group]]
        sub = positions(repeat)
        group, number, at = (np.repeat(column, repeat) for column in (group, number, at))
        kind = groups.kind[group]
        place = (base[kind] + (before[group] + number) * each[kind] + sub) % owners[kind]
        source = overlaps.owners.rank[overlaps.owners.first[turns.owner[kind]] + place]
        kept = np.flatnonzero((source == self._rank) | contains[group])
        group, number, at, sub, source = group[kept], number[kept], at[kept], sub[kept], source[kept]
        kind = groups.kind[group]
        parts = groups.count[group] * each[kind]
        width = int(parts.max(initial=0)) + 1
        lines, line = np.unique(kind * width + parts, return_inverse=True)
        target = turns.target[groups.member[at]]
        return lines // width, lines % width, _Units(group, number, line, number * each[kind] + sub, source, target)

    def _load(self) -> Load:
        units, groups = self._units, self._groups
        size = self._edges[self._begin[self._line_kind + 1]] - self._edges[self._begin[self._line_kind]]
        each = -(-size // np.maximum(self._line_parts, 1))[units.line]
        others = groups.count[units.group] - 1
        sent, entered = ((ranks == self._rank).astype(np.int64) for ranks in (units.source, units.target))
        direct = self._direct
        out, into = direct.source == self._rank, direct.target == self._rank
        sides = []
        for chosen, peers, copies in (
            (out, direct.target, sent + entered * others),
            (into, direct.source, 1 - sent),
        ):
            streams = len(np.unique(peers[chosen])) + int(copies.sum())
            sides.append((int(direct.bytes[chosen].sum() + (each * copies).sum()), streams))
        size_of_side, streams_of_side = zip(*sides, strict=True)
        return Load(max(size_of_side), max(streams_of_side), self._joined.widest_row)

    def buckets(self, count: int, origins: tuple[np.ndarray, np.ndarray]) -> list[Bucket]:
        """Return the buckets of this rank: the `count` that lines are cut into, and one more if any rank forwards.

        origins: as for `schedule`.
        """
        number = count + (self.passes_on and count > 0)
        entering, receiving, passing = self._unit_pieces(count)
        sent = _Pieces.join([self._direct_pieces(number, sends=True), entering, passing])
        received = _Pieces.join([self._direct_pieces(number, sends=False), receiving])
        (send_splits, sends), (receive_splits, receives) = (
            _places(pieces, number, self._world_size) for pieces in (sent, received)
        )
        first = np.full(int(received.unit.max(initial=-1)) + 1, -1)
        came = np.flatnonzero(received.area == _ENTERING)
        first[received.unit[came]] = receives[came]
        passed = np.flatnonzero(sent.shard < 0)
        forward = np.stack([first[sent.unit[passed]], sends[passed], sent.bytes[passed]], axis=1)
        return [
            Bucket(
                Direction(tuple(send_splits[bucket].tolist()), _chunks(sent, sends, bucket, origins[0])),
                Direction(tuple(receive_splits[bucket].tolist()), _chunks(received, receives, bucket, origins[1])),
                _in_runs(forward[sent.bucket[passed] == bucket]),
            )
            for bucket in range(number)
        ]

    def _direct_pieces(self, number: int, sends: bool) -> _Pieces:
        """Cut the direct transfers from this rank, or those to it, into buckets."""
        side = self._direct.source if sends else self._direct.target
        transfers = self._direct.select(np.flatnonzero(side == self._rank))
        peer = transfers.target if sends else transfers.source
        order = np.argsort(peer, kind="stable")
        transfers, peer = transfers.select(order), peer[order]
        peers, begin = np.unique(peer, return_index=True)
        rows = transfers.bounds[:, 1] - transfers.bounds[:, 0]
        streams = equal_streams(begin, len(peer), number)
        part, piece, first, last = cut_streams(rows, transfers.bytes, streams)
        shard = transfers.source_shard if sends else transfers.target_shard
        sizes = self._overlaps.sizes[transfers.name[piece]]
        nothing = np.zeros_like(piece)
        return self._pieces(
            bucket=part % max(number, 1), peer=peer[piece], area=nothing + _DIRECT,
            order=np.stack([-sizes, nothing, nothing, nothing, piece], axis=1), shard=shard[piece],
            bounds=transfers.bounds[piece], rows=(first, last), size=sizes, unit=nothing - 1,
        )  # fmt: skip

    @staticmethod
    def _pieces(
        rows: tuple[np.ndarray, np.ndarray], size: np.ndarray, bounds: np.ndarray, **columns: np.ndarray
    ) -> _Pieces:
        """Make pieces of these rows, first and last, which are counted from the first one of `bounds`."""
        first, last = rows
        cut = np.stack([bounds[:, 0] + first, bounds[:, 0] + last, bounds[:, 2], bounds[:, 3]], axis=1)
        return _Pieces(bounds=cut, bytes=(last - first) * widths(bounds) * size, **columns)

    def _unit_pieces(self, count: int) -> tuple[_Pieces, _Pieces, _Pieces]:
        """Return the pieces that this rank sends from its training weights, receives, and passes on."""
        units, groups, turns = self._units, self._groups, self._turns
        overlaps, order = self._overlaps, self._order
        bounds = overlaps.bounds[order]
        parts = self._line_parts * count
        streams = np.stack([self._begin[self._line_kind], self._begin[self._line_kind + 1], parts], axis=1)
        part, piece, first, last = cut_streams(bounds[:, 1] - bounds[:, 0], overlaps.bytes[order], streams)
        bucket = np.tile(np.arange(count), len(units.line))
        unit = np.repeat(np.arange(len(units.line)), count)
        number = (np.cumsum(parts) - parts)[units.line][unit] + units.part[unit] * count + bucket
        begin, stop = np.searchsorted(part, number, "left"), np.searchsorted(part, number, "right")
        at = np.repeat(begin, stop - begin) + positions(stop - begin)
        bucket, unit = np.repeat(bucket, stop - begin), np.repeat(unit, stop - begin)
        overlap, kind = order[piece[at]], groups.kind[units.group[unit]]
        size = overlaps.sizes[overlaps.owners.name[overlaps.owner[overlap]]]

        def chosen(
            which: np.ndarray, area: int, peer: np.ndarray, member: np.ndarray, shard: np.ndarray, mark: np.ndarray
        ) -> _Pieces:
            keys = np.stack([-size[which], kind[which], units.part[unit[which]], member, piece[at[which]]], axis=1)
            return self._pieces(
                bucket=bucket[which] + (area == _PASSED_ON), peer=peer, area=np.full(len(which), area), order=keys,
                shard=shard, bounds=bounds[piece[at[which]]], size=size[which],
                rows=(first[at[which]], last[at[which]]), unit=mark,
            )  # fmt: skip

        sent = np.flatnonzero(units.source[unit] == self._rank)
        owner = overlaps.owners.first[overlaps.owner[overlap[sent]]] + self._owner_place(kind[sent])
        entering = chosen(
            sent,
            _ENTERING,
            units.target[unit[sent]],
            units.place[unit[sent]],
            overlaps.owners.shard[owner],
            sent * 0 - 1,
        )
        # All receivers of all pieces, except those pieces that this rank merely sends.
        hears = np.flatnonzero(units.source[unit] != self._rank)
        _, other, member = groups.members(units.group[unit[hears]])
        which = np.repeat(hears, groups.count[units.group[unit[hears]]])
        receiver, direct = turns.target[groups.member[member]], other == units.place[unit[which]]
        mine, here = receiver == self._rank, units.target[unit[which]] == self._rank
        shard = overlaps.needs.shard[self._entry(overlap[which], member)]
        came, told, gives = (np.flatnonzero(each) for each in (mine & direct, mine & ~direct, here & ~direct))
        received = [
            chosen(which[take], area, peers[unit[which[take]]], other[take], shard[take], which[take])
            for take, area, peers in ((came, _ENTERING, units.source), (told, _PASSED_ON, units.target))
        ]
        passing = chosen(which[gives], _PASSED_ON, receiver[gives], other[gives], gives * 0 - 1, which[gives])
        return entering, _Pieces.join(received), passing


def _places(pieces: _Pieces, number: int, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes for each peer in each bucket, (buckets, ranks), and where each piece begins in its bucket."""
    keys = (pieces.bucket * world_size + pieces.peer) * 3 + pieces.area
    order = np.lexsort((*pieces.order.T[::-1], keys))
    sizes = pieces.bytes[order]
    used = np.bincount(keys[order], sizes, number * world_size * 3).astype(np.int64)
    areas = (used + -used % ALIGNMENT).reshape(number, world_size * 3)
    begins = (np.cumsum(areas, axis=1) - areas).reshape(-1)
    starts = np.empty(len(order), dtype=np.int64)
    starts[order] = begins[keys[order]] + np.cumsum(sizes) - sizes - (np.cumsum(used) - used)[keys[order]]
    return areas.reshape(number, world_size, 3).sum(axis=2), starts


def _chunks(pieces: _Pieces, starts: np.ndarray, bucket: int, origins: np.ndarray) -> ChunkTable:
    """Return the pieces of one bucket that belong to weights of this rank, in staging order."""
    chosen = np.flatnonzero((pieces.bucket == bucket) & (pieces.shard >= 0))
    chosen = chosen[np.argsort(starts[chosen])]
    shard, bounds, start = pieces.shard[chosen], pieces.bounds[chosen], starts[chosen]
    row, column = origins[shard].T
    edges = bounds - np.stack([row, row, column, column], axis=1)
    return ChunkTable(np.column_stack([shard, edges, start, start + pieces.bytes[chosen]]))


def _in_runs(copies: np.ndarray) -> np.ndarray:
    """Join copies, (copies, 3) of source, target and size, that are adjacent on both sides.

    >>> _in_runs(np.array([[8, 4, 4], [0, 0, 4], [4, 8, 2], [12, 10, 2]])).tolist()
    [[0, 0, 4], [8, 4, 4], [4, 8, 2], [12, 10, 2]]
    >>> _in_runs(np.array([[4, 12, 4], [0, 8, 4]])).tolist()
    [[0, 8, 8]]
    """
    copies = copies[np.argsort(copies[:, 1])]
    behind = copies[:-1, :2] + copies[:-1, 2:] == copies[1:, :2]
    begins = np.flatnonzero(np.r_[True, ~behind.all(axis=1)]) if len(copies) else np.zeros(0, dtype=np.int64)
    sizes = np.add.reduceat(copies[:, 2], begins) if len(copies) else copies[:, 2]
    return np.column_stack([copies[begins, :2], sizes])
