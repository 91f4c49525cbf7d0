"""Which unfinished sequences should change ranks, so that all ranks of a rollout can run a smaller graph.

Graphs are compiled for a few batch sizes, and the ranks of one model run the same: the smallest that holds the rank
with most sequences. As sequences end unevenly that rank keeps all others in a graph that is mostly padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def least_slot_steps(running: Iterable[int], ranks: int, sizes: Sequence[int] = ()) -> int:
    """Ranks x graph size summed over decode steps, if before every step the sequences that run were spread evenly.

    running: sequences of all ranks by step. sizes: of the graphs; without any a rank runs as many as it has. On two
    ranks 5 and then 2 sequences need 2 x 3 + 2 x 1, and with graphs of 2 and 4, 2 x 4 + 2 x 2.
    """
    fullest = [-(-int(number) // ranks) for number in running if number]
    return sum(ranks * (bucket(most, sizes) if sizes else most) for most in fullest)


def rebalance(counts: Sequence[int], sizes: Sequence[int], headroom: Sequence[int] | None = None) -> list[Move]:
    """The fewest moves of sequences after which all ranks run the smallest graph that they can; none if that is the
    present one. Pure, so that every rank finds the same from the same counts.

    counts: unfinished sequences by rank. sizes: of the graphs. headroom: sequences that the KV cache can still
    take, by rank; without it any number.

    With counts 5, 1, 0 and graphs of 1, 2 and 8, two sequences per rank are enough: rank 0 gives two to rank 2, and one
    to rank 1.
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
    """Every surplus sequence finds a place: the largest surplus goes to the emptiest ranks, so few pairs exchange."""
    # Both are in the order of ranks, in which equals stay.
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
