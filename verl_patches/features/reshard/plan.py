"""From two layouts to transfers: which region of which tensor goes from which rank to which rank.

The plan is a pure function of the layouts, so that every rank computes the same one without talking to the others; it
is built from numpy arrays because 256 ranks of DeepSeek-V3 hold a third of a million pieces.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from verl_patches.features.reshard.layout import PADDING, Piece

Layouts = Sequence[Sequence[Piece]]
"""The pieces of every rank, by rank."""


class LayoutError(ValueError):
    """Two layouts cannot be joined; the message names the tensor."""


@dataclass(frozen=True)
class Transfers:
    """Transfers as columns, one entry each; a box is (row start, row stop, column start, column stop).

    source, target: ranks. source_piece, target_piece: positions in the layouts of those ranks.
    name: number of the canonical tensor. box: its region; a vector has the single column 0:1. bytes: on the wire.
    """

    source: np.ndarray
    target: np.ndarray
    source_piece: np.ndarray
    target_piece: np.ndarray
    name: np.ndarray
    box: np.ndarray
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

    names: canonical tensors by number. itemsize: bytes of one element of each, as it travels.
    remote: transfers between ranks, in the order in which each pair of ranks streams them.
    local: transfers inside a rank, which need no communication.
    digest: equal on two ranks if and only if they made the same plan.
    """

    world_size: int
    names: tuple[str, ...]
    itemsize: np.ndarray
    remote: Transfers
    local: Transfers
    digest: str


@dataclass(frozen=True)
class _Holders:
    """The distinct regions of one side and who holds each: entries `first[i]:first[i+1]` of `rank` and `piece`."""

    name: np.ndarray
    box: np.ndarray
    first: np.ndarray
    rank: np.ndarray
    piece: np.ndarray

    @property
    def count(self) -> np.ndarray:
        return np.diff(self.first)


def make_plan(train: Layouts, rollout: Layouts, itemsize: Callable[[str], int]) -> Plan:
    """Plan the transfers that give every rollout piece its content.

    train, rollout: layouts of all ranks; itemsize: bytes of one element of a canonical tensor, as it travels.
    A rank that holds a region itself copies it; otherwise exactly one owner sends it, and owners take turns.
    Raises LayoutError when training pieces overlap without being equal, or when a rollout piece has no complete source.
    """
    if len(train) != len(rollout):
        raise LayoutError(f"{len(train)} training ranks cannot be joined with {len(rollout)} rollout ranks")
    numbers: dict[str, int] = {}
    owners, needs = _holders(train, numbers), _holders(rollout, numbers)
    names = tuple(numbers)
    sizes = np.array([itemsize(name) for name in names], dtype=np.int64)
    _check_disjoint(owners, names)
    need, owner, box = _overlaps(needs, owners)
    _check_complete(needs, need, box, names)
    transfers = _assign_owners(needs, owners, need, owner, box, sizes, len(train))
    remote = transfers.select(np.flatnonzero(transfers.source != transfers.target))
    local = transfers.select(np.flatnonzero(transfers.source == transfers.target))
    return Plan(len(train), names, sizes, remote, local, _digest(names, sizes, transfers))


def _holders(layouts: Layouts, numbers: dict[str, int]) -> _Holders:
    """Group the pieces of all ranks by region. Layouts share piece objects, so each object is read only once."""
    rows: dict[int, int] = {}
    content: list[tuple[int, int, int, int, int]] = []
    row_of, rank_of, piece_of = [], [], []
    for rank, pieces in enumerate(layouts):
        for position, piece in enumerate(pieces):
            row = rows.get(id(piece))
            if row is None:
                row = rows[id(piece)] = len(content)
                content.append(_region(piece, numbers))
            row_of.append(row)
            rank_of.append(rank)
            piece_of.append(position)
    table = np.array(content, dtype=np.int64).reshape(-1, 5)
    row, rank, piece = (np.array(column, dtype=np.int64) for column in (row_of, rank_of, piece_of))
    kept = np.flatnonzero(table[row, 0] >= 0)
    distinct, inverse = np.unique(table, axis=0, return_inverse=True)
    region = inverse.reshape(-1)[row[kept]]
    order = kept[np.argsort(region, kind="stable")]
    padding_rows = int(np.searchsorted(distinct[:, 0], 0))
    counts = np.bincount(region, minlength=len(distinct))[padding_rows:]
    first = np.concatenate([[0], np.cumsum(counts)])
    return _Holders(distinct[padding_rows:, 0], distinct[padding_rows:, 1:], first, rank[order], piece[order])


def _region(piece: Piece, numbers: dict[str, int]) -> tuple[int, int, int, int, int]:
    if piece.canonical == PADDING:
        return -1, 0, 0, 0, 0
    if len(piece.box) > 2:
        raise LayoutError(f"{piece.canonical}: only vectors and matrices are planned, not {len(piece.box)} dimensions")
    (row_start, row_stop), (start, stop) = piece.box if len(piece.box) == 2 else (*piece.box, (0, 1))
    return numbers.setdefault(piece.canonical, len(numbers)), row_start, row_stop, start, stop


def _pairs(left: _Holders, right: _Holders) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of regions that belong to the same canonical tensor. Both sides are sorted by name."""
    begin = np.searchsorted(right.name, left.name, "left")
    count = np.searchsorted(right.name, left.name, "right") - begin
    first = np.repeat(np.arange(len(left.name)), count)
    within = np.arange(len(first)) - np.repeat(np.cumsum(count) - count, count)
    return first, np.repeat(begin, count) + within


def _intersection(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    starts, stops = np.maximum(left[:, 0::2], right[:, 0::2]), np.minimum(left[:, 1::2], right[:, 1::2])
    return np.stack([starts[:, 0], stops[:, 0], starts[:, 1], stops[:, 1]], axis=1)


def _volume(box: np.ndarray) -> np.ndarray:
    return np.maximum(box[:, 1] - box[:, 0], 0) * np.maximum(box[:, 3] - box[:, 2], 0)


def _overlaps(needs: _Holders, owners: _Holders) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    need, owner = _pairs(needs, owners)
    box = _intersection(needs.box[need], owners.box[owner])
    real = np.flatnonzero(_volume(box))
    return need[real], owner[real], box[real]


def _check_disjoint(owners: _Holders, names: tuple[str, ...]) -> None:
    left, right = _pairs(owners, owners)
    volume = _volume(_intersection(owners.box[left], owners.box[right]))
    wrong = np.flatnonzero((left < right) & (volume > 0))
    if len(wrong):
        region = left[wrong[0]]
        raise LayoutError(f"{names[owners.name[region]]}: training ranks hold overlapping but different regions")


def _check_complete(needs: _Holders, need: np.ndarray, box: np.ndarray, names: tuple[str, ...]) -> None:
    covered = np.bincount(need, _volume(box), len(needs.name)).astype(np.int64)
    wrong = np.flatnonzero(covered != _volume(needs.box))
    if len(wrong):
        region = wrong[0]
        raise LayoutError(
            f"{names[needs.name[region]]}: no training rank holds all of the region {needs.box[region].tolist()} that "
            f"rollout rank {needs.rank[needs.first[region]]} needs"
        )


def _assign_owners(
    needs: _Holders,
    owners: _Holders,
    need: np.ndarray,
    owner: np.ndarray,
    box: np.ndarray,
    sizes: np.ndarray,
    world_size: int,
) -> Transfers:
    """Give every receiver of every overlap one owner: itself if it can, otherwise the owners in turn."""
    count = needs.count[need]
    pair = np.repeat(np.arange(len(need)), count)
    slot = np.repeat(needs.first[need], count) + np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
    target, region = needs.rank[slot], owner[pair]
    own = _holder_positions(owners, world_size, region, target)
    # Turns go on over all overlaps that share a set of owners, so that remainders do not pile up on the first owner.
    turn = _turns(owners, region, own < 0)
    chosen = np.where(own < 0, owners.first[region] + turn % owners.count[region], own)
    name = owners.name[region]
    columns = Transfers(
        source=owners.rank[chosen],
        target=target,
        source_piece=owners.piece[chosen],
        target_piece=needs.piece[slot],
        name=name,
        box=box[pair],
        bytes=_volume(box[pair]) * sizes[name],
    )
    # Wide elements first, so that every element in a stream is aligned to its own size.
    order = np.lexsort((columns.target_piece, columns.box[:, 2], columns.box[:, 0], name, -sizes[name]))
    return columns.select(order)


def _holder_positions(owners: _Holders, world_size: int, region: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Where `rank` stands among the holders of `region`, or -1."""
    keys = np.repeat(np.arange(len(owners.name)), owners.count) * world_size + owners.rank
    position = np.searchsorted(keys, region * world_size + rank)
    found = position < len(keys)
    found[found] = keys[position[found]] == (region * world_size + rank)[found]
    return np.where(found, position, -1)


def _turns(owners: _Holders, region: np.ndarray, remote: np.ndarray) -> np.ndarray:
    """Number the remote receivers of every set of owners 0, 1, 2, ..."""
    sets: dict[bytes, int] = {}
    set_of = np.array(
        [
            sets.setdefault(owners.rank[start:stop].tobytes(), len(sets))
            for start, stop in zip(owners.first[:-1], owners.first[1:], strict=True)
        ],
        dtype=np.int64,
    )
    turn = np.zeros(len(region), dtype=np.int64)
    counted = np.flatnonzero(remote)
    order = counted[np.argsort(set_of[region[counted]], kind="stable")]
    grouped = set_of[region[order]]
    starts = np.searchsorted(grouped, np.arange(len(sets)))
    turn[order] = np.arange(len(order)) - starts[grouped]
    return turn


def _digest(names: tuple[str, ...], sizes: np.ndarray, transfers: Transfers) -> str:
    state = hashlib.sha256("\n".join(names).encode())
    state.update(sizes.tobytes())
    for field in fields(transfers):
        state.update(np.ascontiguousarray(getattr(transfers, field.name)).tobytes())
    return state.hexdigest()
