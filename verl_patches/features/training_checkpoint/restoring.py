"""Reads a training checkpoint into the ranks of any layout."""

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
    """Contents of a checkpoint other than weights and optimizer.

    Attributes:
        random: this rank's random states, as tensors; None if another number of ranks saved the checkpoint, because
            then no file belongs to this rank.
        texts: metadata of this rank's file, or of the first file if this rank has none.
    """

    random: Mapping[str, torch.Tensor] | None
    texts: Mapping[str, str]


def load_training(folder: Path, rank: TrainingRank) -> Loaded:
    """Fill this rank's weights and optimizer, and return the other contents; every rank calls this.

    No rank is filled before all ranks have found all files whole, and none returns before all have read theirs. Two
    agreements on the host.

    Raises:
        CheckpointError: a rank found a fault; raised on every rank.
    """
    files = _on_all_ranks(lambda: checked_files(folder, rank, checkpoint_progress))
    # The next collective on the device would wait for the slowest reader, but not as long as that may need.
    _on_all_ranks(lambda: _fill(files, rank))
    name = file_name(rank.rank, rank.world_size)
    if name not in files.random:
        return Loaded(None, files.metadata[min(files.metadata)])
    tensors = {RANDOM + entry: read_whole(stored) for entry, stored in files.random[name].items()}
    return Loaded(tensors, files.metadata[name])


def _on_all_ranks(action: Callable[[], Result]) -> Result:
    """Run `action` and return its result once it has succeeded on all ranks.

    Raises:
        CheckpointError: it raised a CheckpointError or an OSError on some rank; raised on every rank.
    """
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
