"""Writes a training checkpoint: every rank writes its own file, and rank 0 the manifest once all files are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from post_training.checkpoint.durable import Written
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest
from post_training.checkpoint.training_files import (
    MASTER,
    STEPS,
    WEIGHT,
    entry_name,
    file_name,
    write_file,
)
from post_training.checkpoint.training_rank import (
    TrainingRank,
    by_local,
    common_steps,
    parts_of_optimizer_shard,
)
from verl_patches.features.training_checkpoint.host_agreement import agree, checkpoint_progress


@dataclass(frozen=True)
class RankFile:
    """One rank's file of a checkpoint.

    Attributes:
        folder: the checkpoint's folder.
        name: of the file.
        first: whether this is rank 0, which writes the manifest.
        tensors: views of the rank's tensors, by entry.
        metadata: further texts of the file.
        problem: one sentence why the file cannot be written; empty if it can.
    """

    folder: Path
    name: str
    first: bool
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    problem: str = ""

    def write(self) -> tuple[str, Written | None]:
        """Write the file; return the problem, empty if there was none, and size and digest of what was written."""
        path = self.folder / self.name
        if self.problem:
            return self.problem, None
        try:
            (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
            return "", write_file(path, self.tensors, self.metadata, checkpoint_progress)
        except OSError as error:
            return f"{path}: cannot be written ({error.strerror}). Free space or choose another folder", None

    def complete(self, problem: str, written: Written | None) -> Manifest:
        """Agree on what `write` returned on each rank, and write the manifest; every rank calls this and gets it.

        Two agreements on the host.

        Raises:
            CheckpointError: a rank had a problem or is missing; raised on every rank, and there is no manifest then.
        """
        files = agree(problem, (self.name, written))
        manifest = Manifest({"tool": "training_checkpoint", "ranks": len(files)}, files=dict(files), complete=True)
        agree(_write_manifest(manifest, self.folder) if self.first else "")
        return manifest


def rank_file(
    folder: Path, rank: TrainingRank, random: Mapping[str, torch.Tensor], texts: Mapping[str, str]
) -> RankFile:
    """Return the file with this rank's weights, optimizer and random states; random, texts: its `random_states`."""
    name, first = file_name(rank.rank, rank.world_size), rank.rank == 0
    try:
        metadata = {STEPS: str(common_steps(rank.optimizer_shards)), **texts}
        return RankFile(folder, name, first, entries_of(rank) | dict(random), metadata)
    except CheckpointError as error:
        return RankFile(folder, name, first, {}, {}, str(error))


def save_training(file: RankFile) -> Manifest:
    """Write every rank's file now; every rank calls this and gets the manifest.

    Raises:
        CheckpointError: a rank cannot write; raised on every rank, and there is no manifest then.
    """
    return file.complete(*file.write())


def _write_manifest(manifest: Manifest, folder: Path) -> str:
    try:
        manifest.write(folder)
    except OSError as error:
        return f"{folder / MANIFEST_NAME}: cannot be written ({error.strerror})"
    except CheckpointError as error:
        return str(error)
    return ""


def entries_of(rank: TrainingRank) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank writes, by the file's entry names; float32 ones are views and not copied.

    A weight that no optimizer updates, a buffer or a frozen parameter, is written whole and in its own type by one of
    the ranks that hold it.
    """
    shards, entries = by_local(rank.owned), {}
    for optimizer_shard in rank.optimizer_shards:
        states = {MASTER: optimizer_shard.master, **optimizer_shard.moments()}
        for part in parts_of_optimizer_shard(optimizer_shard, shards):
            for state, stretch in states.items():
                entries[entry_name(state, part.hf_name, part.bounds)] = part.of(stretch).float()
    for shard in rank.untrained:
        entries[entry_name(WEIGHT, shard.hf_name, shard.bounds)] = shard.locate(rank.tensors)
    return entries
