"""Cutting a plan into rounds, so that no rank ever stages more than one bucket in either direction.

Each pair of ranks has one stream of bytes, the concatenation of its transfers. Round k of R carries the k-th of R equal
parts of every stream, cut at rows. So R is as small as the busiest rank allows, and both ends cut alike by themselves.
"""

from dataclasses import dataclass

import numpy as np

from verl_patches.features.reshard.plan import Plan, Transfers

ALIGNMENT = 16
"""Bytes: the part of each peer in a staging buffer starts at a multiple of this."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one transfer, as they lie in a staging buffer.

    piece: position in the rank's own layout. narrow: (start, stop) of rows and columns relative to the piece's box.
    start, stop: bytes in the staging buffer.
    """

    piece: int
    narrow: tuple[tuple[int, int], tuple[int, int]]
    start: int
    stop: int


@dataclass(frozen=True)
class Direction:
    """One direction of one round: bytes for each peer (aligned), and the chunks in the staging buffer."""

    splits: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True)
class Round:
    send: Direction
    receive: Direction


def round_count(plan: Plan, bucket_bytes: int) -> int:
    """How many rounds keep every rank's staging within `bucket_bytes` in each direction.

    Raises ValueError when the bucket cannot hold one row for every peer.
    """
    traffic = plan.remote.between(plan.world_size)
    busiest = int(max(traffic.sum(0).max(), traffic.sum(1).max()))
    if busiest == 0:
        return 0
    peers = int(max((traffic > 0).sum(0).max(), (traffic > 0).sum(1).max()))
    if busiest + peers * ALIGNMENT <= bucket_bytes:
        return 1
    # A cut moves to the start of its row, so the part of a peer can grow by one row, and by its alignment.
    room = bucket_bytes - peers * (int(_row_bytes(plan.remote).max()) + ALIGNMENT)
    if room <= 0:
        raise ValueError(
            f"reshard bucket_bytes={bucket_bytes} is too small: {peers} peers with rows of up to "
            f"{int(_row_bytes(plan.remote).max())} bytes need more than {bucket_bytes - room} bytes"
        )
    return -(-busiest // room)


def schedule(plan: Plan, rank: int, rounds: int, pieces: tuple[np.ndarray, np.ndarray]) -> list[Round]:
    """The rounds of one rank.

    pieces: the first row and column of every piece of the rank's source and target layout: arrays (pieces, 2).
    """
    sends = _directions(plan, rank, rounds, plan.remote.source, plan.remote.target, "source_piece", pieces[0])
    receives = _directions(plan, rank, rounds, plan.remote.target, plan.remote.source, "target_piece", pieces[1])
    return [Round(send, receive) for send, receive in zip(sends, receives, strict=True)]


def _row_bytes(transfers: Transfers) -> np.ndarray:
    return transfers.bytes // (transfers.box[:, 1] - transfers.box[:, 0])


def _directions(
    plan: Plan, rank: int, rounds: int, here: np.ndarray, there: np.ndarray, piece_column: str, origins: np.ndarray
) -> list[Direction]:
    mine = np.flatnonzero(here == rank)
    by_peer = mine[np.argsort(there[mine], kind="stable")]
    bounds = np.searchsorted(there[by_peer], np.arange(plan.world_size + 1))
    streams = [plan.remote.select(by_peer[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    parts = [_cut(stream, rounds) if len(stream) else [[]] * rounds for stream in streams]
    return [
        _lay_out([(stream, part[number]) for stream, part in zip(streams, parts, strict=True)], piece_column, origins)
        for number in range(rounds)
    ]


def _cut(stream: Transfers, rounds: int) -> list[list[tuple[int, int, int]]]:
    """The (transfer, first row, last row) that each round carries; rows count from the start of the transfer."""
    ends = np.cumsum(stream.bytes)
    rows, row_bytes = stream.box[:, 1] - stream.box[:, 0], _row_bytes(stream)
    marks = ends[-1] * np.arange(rounds + 1) // rounds
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


def _lay_out(
    parts: list[tuple[Transfers, list[tuple[int, int, int]]]], piece_column: str, origins: np.ndarray
) -> Direction:
    splits, chunks, offset = [], [], 0
    for stream, part in parts:
        begin = offset
        for position, first, last in part:
            piece = int(getattr(stream, piece_column)[position])
            row, row_stop, column, column_stop = (int(edge) for edge in stream.box[position])
            row_origin, column_origin = (int(edge) for edge in origins[piece])
            size = int(stream.bytes[position]) // (row_stop - row) * (last - first)
            rows = (row + first - row_origin, row + last - row_origin)
            columns = (column - column_origin, column_stop - column_origin)
            chunks.append(Chunk(piece, (rows, columns), offset, offset + size))
            offset += size
        offset += -offset % ALIGNMENT
        splits.append(offset - begin)
    return Direction(tuple(splits), tuple(chunks))
