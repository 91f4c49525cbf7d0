"""Reading a training checkpoint into the ranks of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.filling import checked_files, fill_optimizer, fill_weights
from post_training.checkpoint.training_files import RANDOM, TrainingFiles, file_name, read_whole
from post_training.checkpoint.training_rank import TrainingRank
from verl_patches.features.training_checkpoint.host_agreement import agree, checkpoint_progress

Result = TypeVar("Result")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds beside weights and optimizer.

    random: this rank's states of random numbers, as tensors; None where another number of ranks saved them, since
    there is no state for a rank that was not there.
    texts: what the file of this rank says, or the first one where there is none.
    """

    random: Mapping[str, torch.Tensor] | None
    texts: Mapping[str, str]


def load_training(folder: Path, rank: TrainingRank) -> Loaded:
    """Fill this rank's weights and optimizer; every rank calls it. Returns what else there is.

    Nothing is written into any rank before all files have been found whole by all ranks, and none returns before all
    have read theirs. Two agreements on the host.
    Raises CheckpointError on every rank when one finds a fault.
    """
    files = _on_all_ranks(lambda: checked_files(folder, rank, checkpoint_progress))
    # The next collective of the device would wait for the slowest reader, and not as long as that may need.
    _on_all_ranks(lambda: _fill(files, rank))
    name = file_name(rank.rank, rank.world_size)
    if name not in files.random:
        return Loaded(None, files.metadata[min(files.metadata)])
    tensors = {RANDOM + entry: read_whole(stored) for entry, stored in files.random[name].items()}
    return Loaded(tensors, files.metadata[name])


def _on_all_ranks(action: Callable[[], Result]) -> Result:
    """What `action` returns, when it has returned on all ranks. Raises on all of them what it raises on one."""
    try:
        result = action()
    except (CheckpointError, OSError) as error:
        agree(str(error))
        raise
    agree("")
    return result


def _fill(files: TrainingFiles, rank: TrainingRank) -> None:
    with torch.no_grad():
        fill_weights(files, rank, checkpoint_progress)
        fill_optimizer(files, rank, checkpoint_progress)
