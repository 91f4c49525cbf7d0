"""Agreement of the ranks on a checkpoint, on the host, for as long as any rank makes progress.

Ranks finish their files at different times: over 256 ranks on one storage the spread is minutes to an hour. A
collective on the device waits only as long as HCCL and torch_npu's watchdog allow, and then kills the job. So each rank
puts its value into the store of the process group, and rank 0 collects the values and puts the answer there:

    rank r   N/r        its value in agreement N
    rank 0   N/all      the values of all ranks, or which ranks are missing
    rank r   progress/r a number that grows while the rank writes or reads

A rank is missing if it has put no value and made no progress for `silence_s` seconds, however long the whole agreement
takes.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from post_training.checkpoint.files import CheckpointError
from post_training.hang_detection.signs import process_signs
from post_training.process_context import process_context
from verl_patches.features.watch.feature import WATCH

_POLL_S = 1.0
# Seconds between two progress reports to the store, which 256 ranks share.
_BEAT_S = 5.0


class HostAgreement:
    """The agreements of one rank, in the order in which all ranks make them.

    Args:
        store: the process group's, with keys for these agreements only.
        rank, world_size: in the process group.
        silence_s: seconds that a rank may go without a value or progress.
        clock: returns seconds since any origin.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._silence_s, self._clock = silence_s, clock
        self._number, self._beat_at = 0, clock() - _BEAT_S

    def progress(self) -> None:
        """Tell waiting ranks that this one makes progress; any thread may call this, and often."""
        if self._clock() - self._beat_at >= _BEAT_S:
            self._beat_at = self._clock()
            self._store.add(f"progress/{self._rank}", 1)

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. All ranks call this.

        Raises:
            CheckpointError: a rank is missing; raised on every rank that is not.
        """
        self._number += 1
        mine, answer = f"{self._number}/{self._rank}", f"{self._number}/all"
        try:
            self._store.set(mine, pickle.dumps(value))
            if self._rank == 0:
                self._store.set(answer, pickle.dumps(self._collected()))
            elif self._wait([answer], [0]):
                raise CheckpointError(self._missing([0]))
            missing, values = pickle.loads(self._store.get(answer))
        except RuntimeError as error:  # the store's connection is lost, and rank 0 keeps the store
            raise CheckpointError(f"{self._missing([0])} ({error})") from error
        if missing:
            raise CheckpointError(self._missing(missing))
        return values

    def _collected(self) -> tuple[list[int], list[Any]]:
        """Return the missing ranks, and the values of all ranks if none is missing."""
        keys = [f"{self._number}/{rank}" for rank in range(self._world_size)]
        missing = self._wait(keys, range(self._world_size))
        if self._number > 1:  # every rank that is here has read the previous answer
            for rank in range(self._world_size):
                self._store.delete_key(f"{self._number - 1}/{rank}")
        return missing, [] if missing else [pickle.loads(self._store.get(key)) for key in keys]

    def _wait(self, keys: Sequence[str], ranks: Sequence[int]) -> list[int]:
        """Wait for the key of each rank; return those of `ranks` without a key, once they make no more progress."""
        since, seen = self._clock(), [-1]
        left = dict(zip(ranks, keys, strict=True))
        while True:
            try:
                # The hang detector takes a rank whose line contains wait( for one that waits for others.
                self._store.wait(list(left.values()), timedelta(seconds=min(_POLL_S, self._silence_s)))
                return []
            except dist.DistStoreError:
                left = {rank: key for rank, key in left.items() if not self._store.check([key])}
            if self._rank == 0:
                self.progress()  # the other ranks wait only for this one
            moved = [self._store.add(f"progress/{rank}", 0) for rank in left]
            if moved != seen:
                since, seen = self._clock(), moved
            elif self._clock() - since > self._silence_s:
                return list(left)

    def _missing(self, ranks: Sequence[int]) -> str:
        shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        return (
            f"rank{'s' * (len(ranks) > 1)} {shown} did not agree on the checkpoint and made no progress for "
            f"{self._silence_s:g} s. Check the storage of trainer.default_local_dir as that node sees it"
        )


@dataclass(frozen=True)
class _OfGroup:
    """The agreement of a default process group, which its store identifies."""

    store: dist.Store
    agreement: HostAgreement


def process_agreement() -> HostAgreement:
    """Return the agreements of this process in the default process group."""
    store = dist.distributed_c10d._get_default_store()
    kept = process_context().find(_OfGroup)
    if kept is None or kept.store is not store:
        silence = WATCH.current().end_s.checkpoint
        own = dist.PrefixStore("checkpoint-agreement", store)
        agreement = HostAgreement(own, dist.get_rank(), dist.get_world_size(), silence)
        kept = process_context().keep(_OfGroup(store, agreement))
    return kept.agreement


def agree(problem: str, value: Any = None) -> list[Any]:
    """Exchange a problem (empty for none) and a value with all ranks; return every rank's `value`.

    Raises:
        CheckpointError: a rank has a problem or is missing; raised on every rank, with the first rank's problem.
    """
    said = process_agreement().exchange((problem, value))
    for trouble, _ in said:
        if trouble:
            raise CheckpointError(trouble)
    return [each for _, each in said]


def checkpoint_progress(_: int) -> None:
    """Report progress on a checkpoint's file, to the hang detector and to waiting ranks."""
    process_signs().progress("checkpoint")
    if dist.is_initialized():
        process_agreement().progress()
