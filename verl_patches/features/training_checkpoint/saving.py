"""Writing a training checkpoint: every rank its own file, and the manifest when all files are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest
from post_training.checkpoint.training_files import (
    MASTER,
    WEIGHT,
    entry_name,
    file_name,
    is_first_peer,
    owned_pieces,
    write_file,
)
from verl_patches.features.training_checkpoint.optimizer_shards import common_steps
from verl_patches.features.training_checkpoint.rank import TrainingRank, agree, by_local, parts_of_shard

STEPS = "optimizer_steps"


def save_training(
    folder: Path, rank: TrainingRank, random: Mapping[str, torch.Tensor], texts: Mapping[str, str]
) -> Manifest:
    """Write weights, optimizer and states of random numbers into `folder`; every rank calls it and gets the manifest.

    random, texts: this rank's `random_states`. Two object collectives.
    Raises CheckpointError on every rank when one of them cannot write; there is no manifest then.
    """
    problem, mine = "", None
    name = file_name(rank.rank, rank.placement.world_size)
    try:
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        steps = common_steps(rank.shards)
        mine = write_file(folder / name, entries_of(rank) | dict(random), {STEPS: str(steps), **texts})
    except OSError as error:
        problem = f"{folder / name}: cannot be written ({error.strerror}); give the checkpoint room or another folder"
    except CheckpointError as error:
        problem = str(error)
    written = agree(problem, (name, mine))
    manifest = Manifest({"tool": "training_checkpoint", "ranks": len(written)}, files=dict(written), complete=True)
    if rank.rank == 0:
        problem = _write_manifest(manifest, folder)
    agree(problem)
    return manifest


def _write_manifest(manifest: Manifest, folder: Path) -> str:
    try:
        manifest.write(folder)
    except OSError as error:
        return f"{folder / MANIFEST_NAME}: cannot be written ({error.strerror})"
    return ""


def entries_of(rank: TrainingRank) -> dict[str, torch.Tensor]:
    """Views of what this rank writes, by the names of the file's entries; nothing is copied.

    A weight that no optimizer updates, a buffer or a frozen parameter, is written whole by one of the ranks that hold
    it, in its own type.
    """
    owned = owned_pieces(rank.table, rank.placement, rank.rank)
    pieces, entries = by_local(owned), {}
    for shard in rank.shards:
        states = {MASTER: shard.master, **shard.moments()}
        for part in parts_of_shard(shard, pieces):
            for state, stretch in states.items():
                entries[entry_name(state, part.canonical, part.box)] = part.of(stretch)
    for piece in owned:
        if not rank.tensors[piece.local].requires_grad and is_first_peer(rank.placement, rank.rank, piece):
            entries[entry_name(WEIGHT, piece.canonical, piece.box)] = piece.locate(rank.tensors)
    return entries
