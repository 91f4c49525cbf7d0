"""Which unfinished sequences should change ranks, so that all ranks of a rollout can run a smaller graph.

Graphs are compiled for a few batch sizes, and the ranks of one model run the same: the smallest that holds the rank
with most sequences. As sequences end unevenly that rank keeps all others in a graph that is mostly padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """`sequences` sequences go from one rank to another."""

    source: int
    target: int
    sequences: int


def bucket(sequences: int, sizes: Sequence[int]) -> int:
    """The smallest of the graph sizes that holds so many sequences.

    Raises:
        ValueError: none does.
    """
    fitting = [size for size in sizes if size >= sequences]
    if not fitting:
        raise ValueError(f"no graph of {sorted(sizes)} holds {sequences} sequences")
    return min(fitting)


def rebalance(counts: Sequence[int], sizes: Sequence[int], room: Sequence[int] | None = None) -> list[Move]:
    """The fewest moves of sequences after which all ranks run the smallest graph that they can; none if that is the
    present one. Pure, so that every rank finds the same from the same counts.

    counts: unfinished sequences by rank. sizes: of the graphs. room: sequences that a rank's KV cache can still take,
    by rank; without it any number.

    With counts 5, 1, 0 and graphs of 1, 2 and 8, two sequences per rank are enough: rank 0 gives two to rank 2, and one
    to rank 1.
    """
    present = bucket(max(counts, default=0), sizes)
    for size in sorted(set(sizes)):
        if size >= present:
            break
        surplus = {rank: count - size for rank, count in enumerate(counts) if count > size}
        free = {rank: size - count for rank, count in enumerate(counts) if count < size}
        if room is not None:
            free = {rank: min(places, room[rank]) for rank, places in free.items()}
        if sum(surplus.values()) <= sum(free.values()):
            return _paired(surplus, free)
    return []


def _paired(surplus: dict[int, int], free: dict[int, int]) -> list[Move]:
    """Every surplus sequence finds a place: the largest surplus goes to the emptiest ranks, so few pairs exchange."""
    givers = sorted(surplus.items(), key=lambda item: (-item[1], item[0]))
    takers = iter(sorted(free.items(), key=lambda item: (-item[1], item[0])))
    moves, target, places = [], -1, 0
    for source, left in givers:
        while left:
            if not places:
                target, places = next(takers)
                continue
            number = min(left, places)
            moves.append(Move(source, target, number))
            left, places = left - number, places - number
    return moves
