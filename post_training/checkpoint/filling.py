"""Fills a training rank of any layout from the files of a checkpoint with any other layout."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.loading import fill
from post_training.checkpoint.manifest import MANIFEST_NAME, check_digests
from post_training.checkpoint.step_files import complete_manifest
from post_training.checkpoint.training_files import (
    MASTER,
    MOMENTS,
    STEPS,
    WEIGHT,
    TrainingFiles,
    common_metadata,
    open_training_files,
)
from post_training.checkpoint.training_rank import TrainingRank, by_local, parts_of_optimizer_shard
from post_training.layouts.layout import PADDING
from post_training.tensor_parts import copy_in_parts


def steps_of(files: TrainingFiles) -> int:
    """Return the number of updates that the optimizer has made. Raises CheckpointError if the files differ in it."""
    return int(common_metadata(files, STEPS))


def checked_files(folder: Path, rank: TrainingRank, progress: Callable[[int], None]) -> TrainingFiles:
    """Open the files, and check that they hold everything that this rank needs and are unchanged.

    All ranks together hash every file once.

    Args:
        folder: of the checkpoint's model.
        rank: this training rank.
        progress: called with the number of bytes after each read.

    Raises:
        CheckpointError: a file is missing, damaged or another model's.
    """
    files = open_training_files(folder, rank.shapes)
    check_states(folder, files, rank)
    manifest = complete_manifest(folder)
    mine = sorted(manifest.files)[rank.rank :: rank.world_size]
    found = {name: hash_file(folder / name, progress) for name in mine}
    check_digests(folder, manifest.files, found, MANIFEST_NAME)
    return files


def check_states(folder: Path, files: TrainingFiles, rank: TrainingRank) -> None:
    """Raise CheckpointError if a weight that this rank's optimizer updates lacks one of its states."""
    needed = [MASTER, *(MOMENTS if steps_of(files) else ())]
    shards = by_local(rank.shards)
    for local in {optimizer_shard.local for optimizer_shard in rank.optimizer_shards}:
        for name in {shard.hf_name for shard in shards[local]} - {PADDING}:
            for state in needed:
                if state not in files.sources or name not in files.sources[state].tensors:
                    raise CheckpointError(f"{folder}: no file has {state} of {name}. Resume from another checkpoint")


def fill_weights(files: TrainingFiles, rank: TrainingRank, progress: Callable[[int], None]) -> None:
    """Fill the model's weights, rounded from the float32 ones as the optimizer rounds them.

    `progress` is called with the number of bytes after each read.
    """
    for shard in rank.weights:
        target = shard.locate(rank.tensors)
        if shard.hf_name == PADDING:
            target.zero_()
            continue
        state = MASTER if shard.hf_name in files.sources[MASTER].tensors else WEIGHT
        fill(files.sources[state], shard, target, progress)


def fill_optimizer(
    files: TrainingFiles,
    rank: TrainingRank,
    progress: Callable[[int], None],
    states: Collection[str] = (MASTER, *MOMENTS),
) -> None:
    """Fill the optimizer's float32 elements and averages.

    Args:
        files: of the checkpoint.
        rank: this training rank.
        progress: called as by `fill_weights`.
        states: those to fill. Without the averages, the optimizer is like a new one.
    """
    shards, steps = by_local(rank.shards), steps_of(files)
    rank.create_states(steps if MOMENTS[0] in states else 0)
    for optimizer_shard in rank.optimizer_shards:
        stretches = {MASTER: optimizer_shard.master, **optimizer_shard.moments()}
        for part in parts_of_optimizer_shard(optimizer_shard, shards):
            for state, stretch in stretches.items():
                if state not in states:
                    continue
                target = part.of(stretch)
                if part.hf_name == PADDING:
                    target.zero_()
                    continue
                values = torch.empty(target.shape, dtype=torch.float32)
                files.sources[state].read_into(part.hf_name, part.bounds, values)
                copy_in_parts(target, values)
                progress(values.nbytes)
