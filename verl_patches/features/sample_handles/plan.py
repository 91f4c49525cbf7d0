"""Who sends which samples to whom, from nothing but ids: the same on every rank, and without a word between them.

A rank of the rollout generates equal shares: of a generation that begins with id 100 and gives 2 samples to each of 4
ranks, rank 1 has 102 and 103. verl deals the training batch out in order: with 2 data-parallel ranks, the first four of
eight ids go to every rank of the first one.

    order [103, 100, 106, 101 | 102, 107, 104, 105], ranks 0 and 1 of the first data-parallel rank, 2 and 3 of the other
    rank 1 sends 103 to ranks 0 and 1, and 102 to ranks 2 and 3
    rank 0 receives [100, 101] of itself, [103] of rank 1, none of rank 2, [106] of rank 3; its batch takes places
    2, 0, 3, 1 of these four
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class SampleHandleError(RuntimeError):
    """A handle says what no worker has; the message is one sentence."""


@dataclass(frozen=True)
class Generation:
    """Samples `first` to `first + share * ranks - 1`, of which every rank generated `share`, in the order of ranks."""

    first: int
    share: int
    ranks: int

    def holds(self, ids: np.ndarray) -> np.ndarray:
        """Which of the `ids` [samples] are of this generation, bool [samples]."""
        return (ids >= self.first) & (ids < self.first + self.share * self.ranks)


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and receives. sent: for each rank, the rows of its own samples, which are numbered through
    all generations in their order. received: how many samples come from each rank. place: for each sample of the
    batch, where it comes in what is received."""

    sent: tuple[np.ndarray, ...]
    received: np.ndarray
    place: np.ndarray


def owners(ids: np.ndarray, generations: Sequence[Generation]) -> tuple[np.ndarray, np.ndarray]:
    """The rank that generated each of the `ids` [samples], and the sample's row there; int64 [samples] each.

    Raises:
        SampleHandleError: an id is of no generation; a step's samples are gone once it has been trained on.
    """
    rank, row = np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64)
    before = 0
    for generation in generations:
        held = generation.holds(ids)
        within = ids[held] - generation.first
        rank[held], row[held] = within // generation.share, before + within % generation.share
        before += generation.share
    if (rank < 0).any():
        there = ", ".join(f"{each.first} to {each.first + each.share * each.ranks - 1}" for each in generations)
        unknown = int(ids[rank < 0][0])
        raise SampleHandleError(f"no worker has sample {unknown}; there are {there or 'none'}")
    return rank, row


def plan_exchange(
    order: np.ndarray, generations: Sequence[Generation], replica_of_rank: Sequence[int], rank: int
) -> Exchange:
    """The exchange of `rank`, after which it has its part of a batch.

    order: [samples], int64: the batch's ids as the driver deals them out, a multiple of the data-parallel ranks.
    replica_of_rank: for each rank, its data-parallel rank.

    Raises:
        SampleHandleError: an id is of no generation.
    """
    owner, row = owners(order, generations)
    parts = np.split(np.arange(len(order)), max(replica_of_rank) + 1)
    sent = tuple(row[part[owner[part] == rank]] for part in (parts[replica] for replica in replica_of_rank))
    own = owner[parts[replica_of_rank[rank]]]
    # What is received lies by sender, and of one sender in the batch's order.
    place = np.empty(len(own), dtype=np.int64)
    place[np.argsort(own, kind="stable")] = np.arange(len(own))
    return Exchange(sent, np.bincount(own, minlength=len(replica_of_rank)), place)
