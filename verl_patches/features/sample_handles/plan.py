"""Plans the exchange of samples between ranks from their ids alone: every rank finds the same plan on its own.

Rollout ranks generate equal shares: in a generation that begins with id 100 and has 2 samples on each of 4 ranks, rank
1 has 102 and 103. verl distributes the training batch in order: with 2 data-parallel ranks, the first four of eight ids
go to every rank of the first one.

    order [103, 100, 106, 101 | 102, 107, 104, 105], ranks 0 and 1 of the first data-parallel rank, 2 and 3 of the other
    rank 1 sends 103 to ranks 0 and 1, and 102 to ranks 2 and 3
    rank 0 receives [100, 101] from itself, [103] from rank 1, none from rank 2, [106] from rank 3; its batch takes
    places 2, 0, 3, 1 of these four
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class SampleHandleError(RuntimeError):
    """A reference names a sample that no worker has; the message is one sentence."""


@dataclass(frozen=True)
class Generation:
    """Samples `first` to `first + share * ranks - 1`, of which every rank generated `share`, in the order of ranks."""

    first: int
    share: int
    ranks: int

    def holds(self, ids: np.ndarray) -> np.ndarray:
        """Return which of the `ids` [samples] belong to this generation, bool [samples]."""
        return (ids >= self.first) & (ids < self.first + self.share * self.ranks)


@dataclass(frozen=True)
class Exchange:
    """The samples that one rank sends and receives.

    Attributes:
        sent: for each receiving rank, the rows of this rank's samples, numbered through all generations in order.
        received: how many samples come from each rank.
        place: for each sample of this rank's batch, its index among the received ones.
    """

    sent: tuple[np.ndarray, ...]
    received: np.ndarray
    place: np.ndarray


def owners(ids: np.ndarray, generations: Sequence[Generation]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank that generated each of the `ids` [samples], and the sample's row there; int64 [samples] each.

    Raises:
        SampleHandleError: an id is in no generation; a step's samples are gone once it has been trained on.
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
    """Plan the exchange of `rank`, after which it has its part of a batch.

    Args:
        order: [samples], int64: the batch's ids as the driver distributes them, a multiple of the data-parallel ranks.
        generations: the generations whose samples are held.
        replica_of_rank: for each rank, its data-parallel rank.
        rank: this rank.

    Raises:
        SampleHandleError: an id is in no generation.
    """
    owner, row = owners(order, generations)
    parts = np.split(np.arange(len(order)), max(replica_of_rank) + 1)
    sent = tuple(row[part[owner[part] == rank]] for part in (parts[replica] for replica in replica_of_rank))
    own = owner[parts[replica_of_rank[rank]]]
    # Received samples are ordered by sender, and those of one sender in the batch's order.
    place = np.empty(len(own), dtype=np.int64)
    place[np.argsort(own, kind="stable")] = np.arange(len(own))
    return Exchange(sent, np.bincount(own, minlength=len(replica_of_rank)), place)
