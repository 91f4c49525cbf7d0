"""Cutting transfers into buckets, so that no rank stages more than `bucket_bytes` in either direction.

Each pair of ranks has one stream of bytes, the concatenation of its transfers. Bucket k of n carries the k-th of n
equal parts of every stream, cut at rows. So n is as small as the busiest rank allows, and both ends cut alike by
themselves.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from post_training.layouts.layout import Shard
from post_training.reshard.plan import Transfers

ALIGNMENT = 16
"""Bytes: the part of each peer in a staging buffer starts at a multiple of this."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one transfer, as they lie in a staging buffer.

    shard: position in the rank's own layout. narrow: (start, stop) of rows and columns relative to the shard's bounds.
    start, stop: bytes in the staging buffer.
    """

    shard: int
    narrow: tuple[tuple[int, int], tuple[int, int]]
    start: int
    stop: int


@dataclass(frozen=True)
class Direction:
    """One direction of one bucket: bytes for each peer (aligned), and the chunks in the staging buffer."""

    splits: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        return sum(self.splits)

    def peer(self, chunk: Chunk) -> int:
        """The rank that a chunk goes to or comes from."""
        return bisect_right(list(accumulate(self.splits)), chunk.start)


@dataclass(frozen=True)
class Bucket:
    send: Direction
    receive: Direction


def shard_origins(shards: Iterable[Shard]) -> np.ndarray:
    """First row and column of every shard: array (shards, 2); a vector has column 0."""
    rows = [(shard.bounds[0][0], shard.bounds[1][0] if len(shard.bounds) > 1 else 0) for shard in shards]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def bucket_count(transfers: Transfers, world_size: int, bucket_bytes: int) -> int:
    """How many buckets keep every rank's staging within `bucket_bytes` in each direction.

    Raises ValueError when the bucket cannot hold one row for every peer.
    """
    return buckets_of_traffic(transfers.between(world_size), int(_row_bytes(transfers).max(initial=0)), bucket_bytes)


def buckets_of_traffic(traffic: np.ndarray, widest_row: int, bucket_bytes: int) -> int:
    """The same, from the bytes by source and target and those of the longest row."""
    busiest = int(max(traffic.sum(0).max(), traffic.sum(1).max()))
    if busiest == 0:
        return 0
    peers = int(max((traffic > 0).sum(0).max(), (traffic > 0).sum(1).max()))
    if busiest + peers * ALIGNMENT <= bucket_bytes:
        return 1
    # A cut moves to the start of its row, so the part of a peer can grow by one row, and by its alignment.
    room = bucket_bytes - peers * (widest_row + ALIGNMENT)
    if room <= 0:
        raise ValueError(
            f"reshard bucket_bytes={bucket_bytes} is too small: {peers} peers with rows of up to "
            f"{widest_row} bytes need more than {bucket_bytes - room} bytes"
        )
    return -(-busiest // room)


def schedule(
    transfers: Transfers, world_size: int, rank: int, buckets: int, origins: tuple[np.ndarray, np.ndarray]
) -> list[Bucket]:
    """The buckets of one rank.

    origins: the first row and column of every shard of the rank's source and target layout: arrays (shards, 2).
    """
    sent = transfers.select(np.flatnonzero(transfers.source == rank))
    received = transfers.select(np.flatnonzero(transfers.target == rank))
    sends = _directions(sent, sent.target, sent.source_shard, origins[0], world_size, buckets)
    receives = _directions(received, received.source, received.target_shard, origins[1], world_size, buckets)
    return [Bucket(send, receive) for send, receive in zip(sends, receives, strict=True)]


def _row_bytes(transfers: Transfers) -> np.ndarray:
    return transfers.bytes // (transfers.bounds[:, 1] - transfers.bounds[:, 0])


def _directions(
    transfers: Transfers, peer: np.ndarray, shard: np.ndarray, origins: np.ndarray, world_size: int, buckets: int
) -> list[Direction]:
    order = np.argsort(peer, kind="stable")
    limits = np.searchsorted(peer[order], np.arange(world_size + 1))
    streams = [order[start:stop] for start, stop in zip(limits, limits[1:], strict=False)]
    nothing: list[list[tuple[int, int, int]]] = [[]] * buckets
    parts = [_cut(transfers.select(stream), buckets) if len(stream) else nothing for stream in streams]
    narrowed = transfers.bounds - np.repeat(origins[shard], 2, axis=1)
    row_bytes = _row_bytes(transfers)
    directions = []
    for number in range(buckets):
        splits, chunks, offset = [], [], 0
        for stream, part in zip(streams, parts, strict=True):
            begin = offset
            for position, first, last in part[number]:
                entry = stream[position]
                row, _, column, column_stop = narrowed[entry].tolist()
                size = int(row_bytes[entry]) * (last - first)
                rows = (row + first, row + last)
                chunks.append(Chunk(int(shard[entry]), (rows, (column, column_stop)), offset, offset + size))
                offset += size
            offset += -offset % ALIGNMENT
            splits.append(offset - begin)
        directions.append(Direction(tuple(splits), tuple(chunks)))
    return directions


def _cut(stream: Transfers, buckets: int) -> list[list[tuple[int, int, int]]]:
    """The (transfer, first row, last row) that each bucket carries; rows count from the start of the transfer.

    Transfers of 4 and 2 rows of 4 bytes are a stream of 24 bytes, which two buckets cut at byte 12, after 3 rows:

    >>> bounds, unused = np.array([[0, 4, 0, 1], [0, 2, 0, 1]]), np.zeros(2)
    >>> _cut(Transfers(unused, unused, unused, unused, unused, bounds, np.array([16, 8])), 2)
    [[(0, 0, 3)], [(0, 3, 4), (1, 0, 2)]]
    """
    ends = np.cumsum(stream.bytes)
    rows, row_bytes = stream.bounds[:, 1] - stream.bounds[:, 0], _row_bytes(stream)
    marks = ends[-1] * np.arange(buckets + 1) // buckets
    at = np.minimum(np.searchsorted(ends, marks, "right"), len(stream) - 1)
    row = np.where(marks == ends[-1], rows[at], (marks - (ends - stream.bytes)[at]) // row_bytes[at])
    parts = []
    for first, start, last, stop in zip(at[:-1], row[:-1], at[1:], row[1:], strict=True):
        part = [
            (position, int(start) if position == first else 0, int(stop) if position == last else int(rows[position]))
            for position in range(first, last + 1)
        ]
        parts.append([entry for entry in part if entry[1] < entry[2]])
    return parts
