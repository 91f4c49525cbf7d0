"""Find the regions that the ranks of each side hold, and the overlaps of needed regions with owned ones.

Both plans begin here. All data are numpy arrays, because 256 ranks of DeepSeek-V3 hold a third of a million shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from post_training.layouts.layout import PADDING, Shard
from post_training.layouts.regions import Regions

Layouts = Sequence[Sequence[Shard]]
"""The shards of every rank, by rank."""


class LayoutError(ValueError):
    """Two layouts cannot be joined; the message names the tensor."""


@dataclass(frozen=True)
class Holders:
    """The distinct regions of one side.

    Attributes:
        name: number of each region's tensor.
        bounds: of each region.
        first: region i is held by the entries `first[i]:first[i+1]` of `rank` and `shard`.
        rank: holders of the regions, one region after the other.
        shard: position of the region in the layout of each holder.
    """

    name: np.ndarray
    bounds: np.ndarray
    first: np.ndarray
    rank: np.ndarray
    shard: np.ndarray

    @property
    def count(self) -> np.ndarray:
        return np.diff(self.first)


@dataclass(frozen=True)
class Overlaps:
    """Overlaps of needed with owned regions.

    Attributes:
        need, owner: for each overlap, the position of its region in `needs` and in `owners`.
        bounds: the common region.
        sizes: bytes of one element of each tensor.
    """

    needs: Holders
    owners: Holders
    need: np.ndarray
    owner: np.ndarray
    bounds: np.ndarray
    sizes: np.ndarray

    @property
    def bytes(self) -> np.ndarray:
        return volume(self.bounds) * self.sizes[self.owners.name[self.owner]]

    def select(self, chosen: np.ndarray) -> "Overlaps":
        return replace(self, need=self.need[chosen], owner=self.owner[chosen], bounds=self.bounds[chosen])


def holders(layouts: Layouts, numbers: dict[str, int]) -> Holders:
    """Group the shards of all ranks by region. Layouts share shard objects, so each object is read only once.

    Rank 0 holds the upper half of `w`, ranks 1 and 2 the lower: two regions, with the holders `rank[0:1]`, `rank[1:3]`.

    >>> upper, lower = Shard("w", ((0, 2), (0, 3)), "w"), Shard("w", ((2, 4), (0, 3)), "w")
    >>> held = holders([[upper], [lower], [lower]], {})
    >>> held.bounds.tolist(), held.first.tolist(), held.rank.tolist()
    ([[0, 2, 0, 3], [2, 4, 0, 3]], [0, 1, 3], [0, 1, 2])
    """
    flat = list(chain.from_iterable(layouts))
    objects = np.fromiter(map(id, flat), dtype=np.int64, count=len(flat))
    _, first_seen, number = np.unique(objects, return_index=True, return_inverse=True)
    # Number names in the order of the layouts, which is the same on every rank, unlike addresses of objects.
    content = [_region(flat[position], numbers) for position in np.sort(first_seen).tolist()]
    table = np.array(content, dtype=np.int64).reshape(-1, 5)
    row = np.argsort(np.argsort(first_seen))[number.reshape(-1)]
    return _grouped(table, row, np.array([len(shards) for shards in layouts], dtype=np.int64))


@dataclass(frozen=True)
class DistinctRanks:
    """The regions of all ranks of one side, in which ranks with the same regions, a kind, are stored once.

    Attributes:
        rows: those of each kind, one kind after the other, as in `Regions`.
        counts: rows of each kind.
        kind: of every rank.
    """

    rows: np.ndarray
    counts: np.ndarray
    kind: np.ndarray

    @classmethod
    def of(cls, ranks: Sequence[Regions]) -> "DistinctRanks":
        kinds: dict[bytes, int] = {}
        kind = [kinds.setdefault(each.rows.tobytes(), len(kinds)) for each in ranks]
        rows = np.frombuffer(b"".join(kinds), dtype=np.int32).reshape(-1, 5)
        counts = np.array([len(content) for content in kinds], dtype=np.int64) // (rows.itemsize * 5)
        return cls(rows, counts, np.array(kind, dtype=np.int64))

    def holders(self, numbers: np.ndarray) -> Holders:
        """Return what the function `holders` does. `numbers` renumbers the tensors, which `rows` has in model order."""
        table = self.rows.astype(np.int64)
        table[:, 0] = np.where(table[:, 0] < 0, -1, numbers[table[:, 0]])
        table[table[:, 3] < 0, 3:] = 0, 1
        begins, counts = (np.cumsum(self.counts) - self.counts)[self.kind], self.counts[self.kind]
        return _grouped(table, np.repeat(begins, counts) + positions(counts), counts)


def _grouped(table: np.ndarray, row: np.ndarray, counts: np.ndarray) -> Holders:
    """Return the holders of the regions in `table`; the shards of all ranks, `counts` of each, are its rows `row`."""
    rank, shard = np.repeat(np.arange(len(counts)), counts), positions(counts)
    kept = np.flatnonzero(table[row, 0] >= 0)
    distinct, inverse = _distinct_rows(table)
    region = inverse[row[kept]]
    order = kept[np.argsort(region, kind="stable")]
    padding_rows = int(np.searchsorted(distinct[:, 0], 0))
    held = np.bincount(region, minlength=len(distinct))[padding_rows:]
    first = np.concatenate([[0], np.cumsum(held)])
    return Holders(distinct[padding_rows:, 0], distinct[padding_rows:, 1:], first, rank[order], shard[order])


def _distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows in ascending order, and the position of each row among them.

    >>> distinct, number = _distinct_rows(np.array([[2, 0, 1, 0, 1], [1, 5, 6, 0, 1], [2, 0, 1, 0, 1]]))
    >>> distinct.tolist(), number.tolist()
    ([[1, 5, 6, 0, 1], [2, 0, 1, 0, 1]], [1, 0, 1])
    """
    name, row, row_stop, column, column_stop = table.T
    order = np.lexsort((column << 32 | column_stop, row_stop, name << 32 | row))
    ascending = table[order]
    begins = np.r_[True, (ascending[1:] != ascending[:-1]).any(axis=1)][: len(table)]
    inverse = np.empty(len(table), dtype=np.int64)
    inverse[order] = np.cumsum(begins) - 1
    return ascending[begins], inverse


def _region(shard: Shard, numbers: dict[str, int]) -> tuple[int, int, int, int, int]:
    if shard.hf_name == PADDING:
        return -1, 0, 0, 0, 0
    if len(shard.bounds) > 2:
        raise LayoutError(
            f"{shard.hf_name}: only vectors and matrices are supported, not {len(shard.bounds)} dimensions"
        )
    (row_start, row_stop), (start, stop) = shard.bounds if len(shard.bounds) == 2 else (*shard.bounds, (0, 1))
    return numbers.setdefault(shard.hf_name, len(numbers)), row_start, row_stop, start, stop


def pairs(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of positions with equal entries. `right` must ascend.

    >>> [side.tolist() for side in pairs(np.array([3, 5, 7]), np.array([3, 5, 5]))]
    [[0, 1, 1], [0, 1, 2]]
    """
    begin = np.searchsorted(right, left, "left")
    count = np.searchsorted(right, left, "right") - begin
    return np.repeat(np.arange(len(left)), count), np.repeat(begin, count) + positions(count)


def _intersection(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    starts, stops = np.maximum(left[:, 0::2], right[:, 0::2]), np.minimum(left[:, 1::2], right[:, 1::2])
    return np.stack([starts[:, 0], stops[:, 0], starts[:, 1], stops[:, 1]], axis=1)


def volume(bounds: np.ndarray) -> np.ndarray:
    return np.maximum(bounds[:, 1] - bounds[:, 0], 0) * np.maximum(bounds[:, 3] - bounds[:, 2], 0)


def widths(bounds: np.ndarray) -> np.ndarray:
    return bounds[:, 3] - bounds[:, 2]


def find_overlaps(needs: Holders, owners: Holders, sizes: np.ndarray) -> Overlaps:
    """Join both sides by tensor and rows.

    Regions ascend by tensor, then by first row. For a needed region, the candidates are those owned regions of its
    tensor that begin before it ends, from the first one at which this or an earlier region ends after it begins.
    """
    starts, stops = (owners.name << 32 | owners.bounds[:, column] for column in (0, 1))
    begin = np.searchsorted(np.maximum.accumulate(stops), needs.name << 32 | needs.bounds[:, 0], "right")
    count = np.maximum(np.searchsorted(starts, needs.name << 32 | needs.bounds[:, 1], "left") - begin, 0)
    need = np.repeat(np.arange(len(count)), count)
    owner = np.repeat(begin, count) + positions(count)
    bounds = _intersection(needs.bounds[need], owners.bounds[owner])
    real = np.flatnonzero(volume(bounds))
    return Overlaps(needs, owners, need[real], owner[real], bounds[real], sizes)


def check_disjoint(owners: Holders, names: tuple[str, ...]) -> None:
    neighbours = np.arange(1, len(owners.name))
    neighbours = neighbours[owners.name[neighbours - 1] == owners.name[neighbours]]
    grid = np.flatnonzero(_cut_in_both(owners))
    left, right = pairs(owners.name[grid], owners.name[grid])
    ordered = left < right
    left = np.r_[neighbours - 1, grid[left[ordered]]]
    right = np.r_[neighbours, grid[right[ordered]]]
    wrong = np.flatnonzero(volume(_intersection(owners.bounds[left], owners.bounds[right])))
    if len(wrong):
        region = left[wrong[0]]
        raise LayoutError(f"{names[owners.name[region]]}: training ranks hold overlapping but different regions")


def _cut_in_both(owners: Holders) -> np.ndarray:
    """Return for each region whether the regions of its tensor differ both in rows and in columns.

    If they differ in only one of both, they are intervals in ascending order, whose neighbours overlap if any do.
    """
    if not len(owners.name):
        return np.zeros(0, dtype=bool)
    begins = np.flatnonzero(np.r_[True, owners.name[1:] != owners.name[:-1]])
    varies = np.maximum.reduceat(owners.bounds, begins) != np.minimum.reduceat(owners.bounds, begins)
    both = varies[:, :2].any(axis=1) & varies[:, 2:].any(axis=1)
    return np.repeat(both, np.diff(np.r_[begins, len(owners.name)]))


def check_complete(overlaps: Overlaps, names: tuple[str, ...]) -> None:
    needs = overlaps.needs
    covered = np.bincount(overlaps.need, volume(overlaps.bounds), len(needs.name)).astype(np.int64)
    wrong = np.flatnonzero(covered != volume(needs.bounds))
    if len(wrong):
        region = wrong[0]
        raise LayoutError(
            f"{names[needs.name[region]]}: no training rank owns all of the region {needs.bounds[region].tolist()} "
            f"that rollout rank {needs.rank[needs.first[region]]} needs"
        )


def positions(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... inside every run, for runs of these lengths.

    >>> positions(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def running(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return for each entry the sum of `counts` over earlier entries with the same key.

    >>> running(np.array([7, 5, 7, 7]), np.array([2, 1, 3, 1])).tolist()
    [0, 0, 2, 5]
    """
    order = np.argsort(keys, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
    totals = np.empty(len(keys), dtype=np.int64)
    totals[order] = before - np.repeat(before[begins], np.diff(begins, append=len(keys)))
    return totals


def rank_sets(held: Holders) -> np.ndarray:
    """Return a number for every region, equal for regions that the same ranks hold."""
    numbers = held.rank[held.first[:-1]]  # for a region that one rank holds, the rank
    least, sets = int(held.rank.max(initial=0)) + 1, dict[bytes, int]()
    for region in np.flatnonzero(held.count > 1).tolist():
        ranks = held.rank[held.first[region] : held.first[region + 1]].tobytes()
        numbers[region] = sets.setdefault(ranks, least + len(sets))
    return numbers
