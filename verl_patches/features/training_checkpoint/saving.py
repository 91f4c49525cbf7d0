"""Writing a training checkpoint: every rank its own file, and the manifest when all files are there."""

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
    """What one rank writes of a checkpoint.

    tensors: by entry, views of what the rank holds. metadata: texts beside them. problem: why there is nothing to
    write, a sentence; empty where there is.
    """

    folder: Path
    name: str
    first: bool
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    problem: str = ""

    def write(self) -> tuple[str, Written | None]:
        """Write the file; returns the problem, empty where there was none, and what was written."""
        path = self.folder / self.name
        if self.problem:
            return self.problem, None
        try:
            (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
            return "", write_file(path, self.tensors, self.metadata, checkpoint_progress)
        except OSError as error:
            return f"{path}: cannot be written ({error.strerror}); give the checkpoint room or another folder", None

    def complete(self, problem: str, written: Written | None) -> Manifest:
        """Agree on what `write` returned on each rank, and list all files; every rank calls it and gets the manifest.

        Two agreements on the host. Raises CheckpointError on every rank when one had a problem or is missing; there is
        no manifest then.
        """
        files = agree(problem, (self.name, written))
        manifest = Manifest({"tool": "training_checkpoint", "ranks": len(files)}, files=dict(files), complete=True)
        agree(_write_manifest(manifest, self.folder) if self.first else "")
        return manifest


def rank_file(
    folder: Path, rank: TrainingRank, random: Mapping[str, torch.Tensor], texts: Mapping[str, str]
) -> RankFile:
    """Weights, optimizer and states of random numbers of this rank. random, texts: its `random_states`."""
    name, first = file_name(rank.rank, rank.world_size), rank.rank == 0
    try:
        metadata = {STEPS: str(common_steps(rank.optimizer_shards)), **texts}
        return RankFile(folder, name, first, entries_of(rank) | dict(random), metadata)
    except CheckpointError as error:
        return RankFile(folder, name, first, {}, {}, str(error))


def save_training(file: RankFile) -> Manifest:
    """Write every rank's file now; every rank calls it and gets the manifest.

    Raises CheckpointError on every rank when one of them cannot write; there is no manifest then.
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
    """Views of what this rank writes, by the names of the file's entries; what is float32 is not copied.

    A weight that no optimizer updates, a buffer or a frozen parameter, is written whole by one of the ranks that hold
    it, in its own type.
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
