"""Packs the sequences of a batch into micro batches, by their lengths alone.

Every data-parallel rank needs as many micro batches as the others, because experts are exchanged between them in step.
So each rank first packs its own sequences by first fit; the rank that needs most micro batches decides their number,
and each rank spreads its sequences over that many.

Lengths 5, 3, 3, 2 with at most 6 tokens: first fit of the longest first makes [5], [3, 3], [2]. If another rank needs
four, the heaviest micro batch of several sequences is parted: [5], [3], [3], [2].
"""

from __future__ import annotations

from collections.abc import Sequence


def first_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Pack indices of `lengths` into bins of at most `limit`, longest first; longer ones have a bin to themselves."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        place = next((each for each, left in enumerate(room) if lengths[index] <= left), None)
        if place is None:
            bins.append([])
            room.append(limit)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def spread(lengths: Sequence[int], limit: int, number: int) -> list[list[int]]:
    """Spread indices of `lengths` over exactly `number` bins, as evenly as the limit allows, heaviest bin first.

    Args:
        number: at least as many as `first_fit` makes, and at most as many as there are lengths.

    Returns:
        The bins; none is empty, and none of several sequences exceeds `limit`. Indices within a bin ascend.
    """
    bins = _evenly(lengths, number)
    if any(len(each) > 1 and _total(lengths, each) > limit for each in bins):
        bins = first_fit(lengths, limit)
        while len(bins) < number:
            heaviest = max((each for each in bins if len(each) > 1), key=lambda each: _total(lengths, each))
            bins.remove(heaviest)
            bins += [[heaviest[at] for at in half] for half in _evenly([lengths[each] for each in heaviest], 2)]
    return sorted((sorted(each) for each in bins), key=lambda each: (-_total(lengths, each), each))


def _evenly(lengths: Sequence[int], number: int) -> list[list[int]]:
    """Assign each index, longest first, to the bin with the smallest total; empty bins come first."""
    bins: list[list[int]] = [[] for _ in range(number)]
    totals = [0] * number
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        place = min(range(number), key=lambda each: (bool(bins[each]), totals[each], each))
        bins[place].append(index)
        totals[place] += lengths[index]
    return bins


def _total(lengths: Sequence[int], chosen: Sequence[int]) -> int:
    return sum(lengths[each] for each in chosen)
