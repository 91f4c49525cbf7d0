"""Make every rank raise when one rank fails in a reshard.

If a rank's packing or writing raised, all ranks report the bucket, the peer and the weight; if a rank is gone, they
report which one, and how far they had come themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MEMBERSHIP_CHECK_S = 10.0
"""How long a rank waits for heartbeats of the others after a collective has failed."""


class ReshardError(RuntimeError):
    """A reshard did not finish. The rollout weights are a mixture until one does."""


class Attempt:
    """One run on this rank. After its first failure it neither reads nor writes weights, but still takes part in the
    collectives, so that nobody waits for it and all learn of the failure when they agree at the end.

    Attributes:
        failure: the first failure of this rank; empty if there is none.
        reached: where this rank last began a collective.
    """

    def __init__(self) -> None:
        self.failure = ""
        self.reached = "before the first bucket"

    def step(self, where: str, action: Callable[..., Any], *arguments: Any) -> None:
        """Run `action` unless this attempt has failed; its exception becomes the failure of the attempt."""
        if self.failure:
            return
        try:
            action(*arguments)
        except Exception as error:
            self.failure = f"{where}{error}"


@dataclass(frozen=True)
class MembershipCheck:
    """Finds missing ranks after a collective has failed, through the process group's store and without collectives.

    Attributes:
        name: the same on all ranks and used for one run only.
        seconds: total wait for all other ranks.
        store: of a group with processes of several worlds, kept by the group's rank 0; None for this world's store.
    """

    group: dist.ProcessGroup
    name: str
    seconds: float
    store: dist.Store | None = None

    def missing(self) -> list[int]:
        """Return the ranks of the group that do not answer; if the store is gone, the rank that keeps it."""
        ranks = range(dist.get_world_size(self.group))
        try:
            kept = dist.distributed_c10d._get_default_store() if self.store is None else self.store
            store = dist.PrefixStore(self.name, kept)
            store.set(str(dist.get_rank(self.group)), "here")
            try:
                # One wait for all of them: a node that is gone takes many ranks with it.
                store.wait([str(rank) for rank in ranks], timedelta(seconds=self.seconds))
            except dist.DistStoreError:
                return [rank for rank in ranks if not store.check([str(rank)])]
            return []
        except RuntimeError:  # the store's connection is lost
            return [rank for rank in ranks if self._keeps_store(rank)]

    def _keeps_store(self, rank: int) -> bool:
        return rank == 0 if self.store is not None else dist.get_global_rank(self.group, rank) == 0


def agree_on_success(
    attempt: Attempt, group: dist.ProcessGroup, device: torch.device, stamp: int | None = None
) -> None:
    """Raise ReshardError on every rank if the attempt of any rank failed or had a different stamp.

    One all-reduce of one integer, or of three with a stamp; only after a failure also an object collective that
    distributes the message.

    Args:
        attempt: of this rank.
        group: all ranks of the run.
        device: for the all-reduce.
        stamp: the step whose weights this rank sends, if ranks could differ.
    """
    failure = [int(bool(attempt.failure))]
    found = torch.tensor(failure if stamp is None else [*failure, stamp, -stamp], dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    failed, *steps = found.tolist()
    if not failed and (not steps or steps[0] == -steps[1]):
        return
    if stamp is not None and stamp != steps[0] and not attempt.failure:
        attempt.failure = f"with the weights of step {stamp}, but another rank is at step {steps[0]}"
    failures: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(failures, attempt.failure, group=group)
    texts = [f"rank {rank} failed {text}" for rank, text in enumerate(failures) if text]
    others = len(texts) - 1
    suffix = f" (and {others} other rank{'s' if others > 1 else ''})" if others else ""
    raise ReshardError(f"reshard: {texts[0]}{suffix}")


@contextmanager
def naming_the_missing(attempt: Attempt, membership: MembershipCheck) -> Iterator[None]:
    """Turn exceptions of collectives in the block into a ReshardError that names the ranks that do not answer.

    HCCL's work is asynchronous: its error about a lost rank may surface in a step of the attempt first, followed by a
    less informative one. Both are kept.
    """
    try:
        yield
    except ReshardError:
        raise
    except Exception as error:
        missing = membership.missing()
        found = f"did not hear from ranks {missing}" if missing else "heard from all ranks, and a collective failed"
        reason = f"{attempt.failure}; then {error}" if attempt.failure else str(error)
        raise ReshardError(
            f"reshard: rank {dist.get_rank(membership.group)} {found}, {attempt.reached} or before it: {reason}"
        ) from error
