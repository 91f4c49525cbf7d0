"""Decides which unfinished sequences migrate between ranks, so that all ranks of a rollout can run a smaller graph.

Graphs are compiled for a few batch sizes, and the ranks of one model run the same graph: the smallest one that holds
the sequences of the fullest rank. As sequences end unevenly, that rank keeps all others in a graph that is mostly
padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """Migration of `sequences` sequences from one rank to another."""

    source: int
    target: int
    sequences: int


def bucket(sequences: int, sizes: Sequence[int]) -> int:
    """Return the smallest graph size that holds `sequences` sequences.

    Raises:
        ValueError: no graph is large enough.
    """
    fitting = [size for size in sizes if size >= sequences]
    if not fitting:
        raise ValueError(f"no graph of {sorted(sizes)} fits {sequences} sequences")
    return min(fitting)


def least_slot_steps(running: Iterable[int], ranks: int, sizes: Sequence[int] = ()) -> int:
    """Return ranks x graph size summed over decode steps, if running sequences were spread evenly before every step.

    On two ranks 5 and then 2 sequences need 2 x 3 + 2 x 1, and with graphs of 2 and 4, 2 x 4 + 2 x 2.

    Args:
        running: number of running sequences on all ranks, by step.
        ranks: number of ranks.
        sizes: of the graphs; without any, a rank runs as many rows as it has sequences.
    """
    fullest = [-(-int(number) // ranks) for number in running if number]
    return sum(ranks * (bucket(most, sizes) if sizes else most) for most in fullest)


def rebalance(counts: Sequence[int], sizes: Sequence[int], headroom: Sequence[int] | None = None) -> list[Move]:
    """Return the fewest migrations after which all ranks run the smallest possible graph.

    There are none if the present graph is the smallest possible. The result depends only on the arguments, so every
    rank computes the same from the same counts. With counts 5, 1, 0 and graphs of 1, 2 and 8, two sequences per rank
    are enough: rank 0 gives two to rank 2, and one to rank 1.

    Args:
        counts: unfinished sequences by rank.
        sizes: of the graphs.
        headroom: number of sequences for which the KV cache of a rank has room; None for any number.
    """
    present = bucket(max(counts, default=0), sizes)
    for size in sorted(set(sizes)):
        if size >= present:
            break
        surplus = {rank: count - size for rank, count in enumerate(counts) if count > size}
        free = {rank: size - count for rank, count in enumerate(counts) if count < size}
        if headroom is not None:
            free = {rank: min(places, headroom[rank]) for rank, places in free.items()}
        if sum(surplus.values()) <= sum(free.values()):
            return _paired(surplus, free)
    return []


def _paired(surplus: dict[int, int], free: dict[int, int]) -> list[Move]:
    """Assign every surplus sequence: the largest surplus goes to the emptiest ranks, so that few pairs exchange."""
    # Both are sorted stably, so ranks with equal numbers stay in order.
    givers = sorted(surplus.items(), key=lambda item: -item[1])
    takers = iter(sorted(free.items(), key=lambda item: -item[1]))
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
