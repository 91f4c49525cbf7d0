"""Cut transfers into buckets, so that no rank stages more than `bucket_bytes` in either direction.

Each pair of ranks has one stream of bytes, the concatenation of its transfers. Bucket k of n carries the k-th of n
equal parts of every stream, cut at rows. So n is as small as the busiest rank allows, and both ends cut alike without
communication.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from post_training.layouts.layout import Shard
from post_training.reshard.overlaps import positions
from post_training.reshard.plan import Transfers

ALIGNMENT = 16
"""In bytes; the part of each peer in a staging buffer starts at a multiple of this."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one transfer in a staging buffer.

    Attributes:
        shard: position in the rank's own layout.
        narrow: (start, stop) of rows and of columns, relative to the shard's bounds.
        start, stop: bytes in the staging buffer.
    """

    shard: int
    narrow: tuple[tuple[int, int], tuple[int, int]]
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """Chunks as rows of an array; with FSDP2, an update has hundreds of thousands.

    Attributes:
        values: (chunks, 7) of int64: shard, start and stop of rows, of columns, and of bytes in the staging buffer.
    """

    values: np.ndarray

    def __iter__(self) -> Iterator[Chunk]:
        for shard, row, row_stop, column, column_stop, start, stop in self.values.tolist():
            yield Chunk(shard, ((row, row_stop), (column, column_stop)), start, stop)


@dataclass(frozen=True)
class Direction:
    """One direction of one bucket: bytes for each peer (aligned), and the chunks in the staging buffer."""

    splits: tuple[int, ...]
    chunks: Iterable[Chunk]

    @property
    def size(self) -> int:
        return sum(self.splits)

    @property
    def chunk_bytes(self) -> int:
        """Bytes without padding for alignment."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def peer(self, chunk: Chunk) -> int:
        """Return the rank that a chunk goes to or comes from."""
        return bisect_right(list(accumulate(self.splits)), chunk.start)


@dataclass(frozen=True)
class Bucket:
    """One bucket of one rank.

    Attributes:
        forward: (copies, 3) of int64: bytes of the previous bucket, as it was received, that this one forwards: their
            start there, their start here, and their number. None if no rank forwards anything.
    """

    send: Direction
    receive: Direction
    forward: np.ndarray | None = field(default=None, compare=False)

    @property
    def send_bytes(self) -> int:
        """Bytes that this bucket sends, without padding for alignment."""
        return self.send.chunk_bytes + (0 if self.forward is None else int(self.forward[:, 2].sum()))


def shard_origins(shards: Iterable[Shard]) -> np.ndarray:
    """Return first row and column of every shard: array (shards, 2); a vector has column 0."""
    rows = [(shard.bounds[0][0], shard.bounds[1][0] if len(shard.bounds) > 1 else 0) for shard in shards]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


class BucketError(ValueError):
    """A bucket cannot hold one row of each of its streams. The text names no key: callers know who set the size.

    Attributes:
        least: bytes of the smallest bucket that can.
    """

    def __init__(self, bucket_bytes: int, streams: int, widest_row: int) -> None:
        super().__init__(
            f"a bucket of {bucket_bytes} bytes cannot hold a row of up to {widest_row} bytes for each of {streams} "
            "streams"
        )
        self.least = streams * (widest_row + ALIGNMENT) + 1


def bucket_count(transfers: Transfers, world_size: int, bucket_bytes: int) -> int:
    """Return how many buckets keep every rank's staging within `bucket_bytes` in each direction.

    Raises:
        BucketError: the bucket cannot hold one row for every peer.
    """
    return buckets_of_traffic(transfers.between(world_size), int(_row_bytes(transfers).max(initial=0)), bucket_bytes)


def buckets_of_traffic(traffic: np.ndarray, widest_row: int, bucket_bytes: int) -> int:
    """Return the same from the bytes by source and target, and the bytes of the longest row."""
    busiest = int(max(traffic.sum(0).max(), traffic.sum(1).max()))
    if busiest == 0:
        return 0
    peers = int(max((traffic > 0).sum(0).max(), (traffic > 0).sum(1).max()))
    if busiest + peers * ALIGNMENT <= bucket_bytes:
        return 1
    # A cut moves to the start of its row, so the part of a peer can grow by one row, and by its alignment.
    room = bucket_bytes - peers * (widest_row + ALIGNMENT)
    if room <= 0:
        raise BucketError(bucket_bytes, peers, widest_row)
    return -(-busiest // room)


def schedule(
    transfers: Transfers, world_size: int, rank: int, buckets: int, origins: tuple[np.ndarray, np.ndarray]
) -> list[Bucket]:
    """Return the buckets of one rank.

    `origins` are the first row and column of every shard of the rank's source and target layout: arrays (shards, 2).
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
    transfers, shard = transfers.select(order), shard[order]
    peers, begin = np.unique(peer[order], return_index=True)
    part, at, first, last = _cut(transfers, begin, buckets)
    sizes = _row_bytes(transfers)[at] * (last - first)
    used = np.bincount(part, sizes, buckets * len(peers)).astype(np.int64)
    splits = np.zeros((buckets, world_size), dtype=np.int64)
    splits[:, peers] = (used + -used % ALIGNMENT).reshape(buckets, len(peers))
    part_begins = (np.cumsum(splits, axis=1) - splits)[:, peers].reshape(-1)
    start = np.cumsum(sizes) - sizes + (part_begins - (np.cumsum(used) - used))[part]
    row, column = (transfers.bounds[at, edge] - origins[shard[at], edge // 2] for edge in (0, 2))
    width = transfers.bounds[at, 3] - transfers.bounds[at, 2]
    columns = np.stack([shard[at], row + first, row + last, column, column + width, start, start + sizes], axis=1)
    limits = np.searchsorted(part, np.arange(buckets + 1) * len(peers))
    return [
        Direction(tuple(splits[number].tolist()), ChunkTable(columns[limits[number] : limits[number + 1]]))
        for number in range(buckets)
    ]


def _cut(
    transfers: Transfers, begin: np.ndarray, buckets: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut consecutive streams, which begin at these transfers, into equal parts of whole rows.

    Returns four columns with one entry per piece, ordered by bucket and stream: its part `bucket * streams + stream`,
    its transfer, and its first row and the one after its last, from the start of the transfer.

    Transfers of 4 and 2 rows of 4 bytes are a stream of 24 bytes, which two buckets cut at byte 12, after 3 rows:

    >>> bounds, unused = np.array([[0, 4, 0, 1], [0, 2, 0, 1]]), np.zeros(2)
    >>> stream = Transfers(unused, unused, unused, unused, unused, bounds, np.array([16, 8]))
    >>> [column.tolist() for column in _cut(stream, np.array([0]), 2)]
    [[0, 1, 1], [0, 0, 1], [0, 3, 0], [3, 4, 2]]
    """
    streams = equal_streams(begin, len(transfers), buckets)
    rows = transfers.bounds[:, 1] - transfers.bounds[:, 0]
    part, piece, first, last = cut_streams(rows, transfers.bytes, streams)
    part = part % max(buckets, 1) * len(begin) + part // max(buckets, 1)
    order = np.argsort(part, kind="stable")
    return part[order], piece[order], first[order], last[order]


def equal_streams(begin: np.ndarray, transfers: int, parts: int) -> np.ndarray:
    """Return consecutive streams for `cut_streams`, which begin at these transfers and have `parts` parts each."""
    return np.stack([begin, np.append(begin, transfers)[1:], np.full(len(begin), parts)], axis=1)


def cut_streams(
    rows: np.ndarray, size: np.ndarray, streams: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut streams into equal parts of whole rows.

    Args:
        rows, size: number of rows and of bytes of each transfer.
        streams: (streams, 3): the first transfer of each, the one after its last, and the number of its parts.

    Returns:
        Four columns with one entry per piece, in ascending order: its part, counted through all streams, its transfer,
        and its first row and the one after its last, from the start of the transfer.
    """
    begin, stop, parts = streams.T
    edges = np.append(0, np.cumsum(size))
    # By stream and part: the byte at which the part begins, and the transfer and the row of that byte.
    stream, number = np.repeat(np.arange(len(streams)), parts + 1), positions(parts + 1)
    whole = (edges[stop] - edges[begin])[stream]
    marks = edges[begin][stream] + whole * number // np.maximum(parts, 1)[stream]
    at = np.minimum(np.searchsorted(edges[1:], marks, "right"), stop[stream] - 1)
    row = np.where(marks == edges[stop][stream], rows[at], (marks - edges[at]) // (size // rows)[at])
    starts = np.flatnonzero(number < parts[stream])
    first, last = at[starts], at[starts + 1]
    count = last - first + 1
    part = np.repeat(np.arange(len(count)), count)
    piece = first[part] + positions(count)
    start = np.where(piece == first[part], row[starts][part], 0)
    end = np.where(piece == last[part], row[starts + 1][part], rows[piece])
    kept = np.flatnonzero(start < end)
    return part[kept], piece[kept], start[kept], end[kept]
