"""Reading a training checkpoint into the ranks of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.loading import fill
from post_training.checkpoint.manifest import MANIFEST_NAME, check_digests
from post_training.checkpoint.training_files import (
    MASTER,
    MOMENTS,
    RANDOM,
    WEIGHT,
    TrainingFiles,
    common_metadata,
    complete_manifest,
    file_name,
    open_training_files,
    read_whole,
)
from post_training.layouts.layout import PADDING
from post_training.tensor_parts import copy_in_parts
from verl_patches.features.training_checkpoint.host_agreement import agree, checkpoint_progress
from verl_patches.features.training_checkpoint.rank import TrainingRank, by_local, parts_of_optimizer_shard
from verl_patches.features.training_checkpoint.saving import STEPS

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
    files = _on_all_ranks(lambda: _checked(folder, rank))
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
        _fill_weights(files, rank)
        _fill_optimizer(files, rank)


def _checked(folder: Path, rank: TrainingRank) -> TrainingFiles:
    """The files, once this rank has found that they hold what it needs, and are what was written."""
    files = open_training_files(folder, rank.shapes)
    _check_states(folder, files, rank)
    manifest = complete_manifest(folder)
    mine = sorted(manifest.files)[rank.rank :: rank.world_size]  # all ranks together hash every file once
    found = {name: hash_file(folder / name, checkpoint_progress) for name in mine}
    check_digests(folder, manifest.files, found, MANIFEST_NAME)
    return files


def _steps(files: TrainingFiles) -> int:
    return int(common_metadata(files, STEPS))


def _check_states(folder: Path, files: TrainingFiles, rank: TrainingRank) -> None:
    """Every weight that this rank's optimizer updates has the states that it needs."""
    needed = [MASTER, *(MOMENTS if _steps(files) else ())]
    shards = by_local(rank.shards)
    for local in {optimizer_shard.local for optimizer_shard in rank.optimizer_shards}:
        for name in {shard.hf_name for shard in shards[local]} - {PADDING}:
            for state in needed:
                if state not in files.sources or name not in files.sources[state].tensors:
                    raise CheckpointError(f"{folder}: no file has {state} of {name}; resume from another checkpoint")


def _fill_weights(files: TrainingFiles, rank: TrainingRank) -> None:
    """The model's weights, rounded from the float32 ones as the optimizer rounds them."""
    for shard in rank.weights:
        target = shard.locate(rank.tensors)
        if shard.hf_name == PADDING:
            target.zero_()
            continue
        state = MASTER if shard.hf_name in files.sources[MASTER].tensors else WEIGHT
        fill(files.sources[state], shard, target, checkpoint_progress)


def _fill_optimizer(files: TrainingFiles, rank: TrainingRank) -> None:
    shards, steps = by_local(rank.shards), _steps(files)
    rank.create_states(steps)
    for optimizer_shard in rank.optimizer_shards:
        stretches = {MASTER: optimizer_shard.master, **optimizer_shard.moments()}
        for part in parts_of_optimizer_shard(optimizer_shard, shards):
            for state, stretch in stretches.items():
                target = part.of(stretch)
                if part.hf_name == PADDING:
                    target.zero_()
                    continue
                values = torch.empty(target.shape, dtype=torch.float32)
                files.sources[state].read_into(part.hf_name, part.bounds, values)
                copy_in_parts(target, values)
                checkpoint_progress(values.nbytes)
