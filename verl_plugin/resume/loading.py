"""Loads checkpoints into verl's engines that verl itself cannot load: docs/checkpoints.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.filling import check_states, fill_optimizer, fill_weights
from post_training.checkpoint.manifest import MANIFEST_NAME, check_digests
from post_training.checkpoint.schedule import set_place_in_schedule
from post_training.checkpoint.training_files import TrainingFiles, complete_manifest, open_training_files
from post_training.checkpoint.training_rank import TrainingRank
from verl_plugin.resume.fsdp2_files import SavedRanks, ranks_that_saved


def load_training(folder: Path, rank: TrainingRank) -> None:
    """Fill this rank's weights and optimizer; every rank calls it.

    Nothing is written into any rank before all files have been found whole by all ranks.

    Args:
        folder: `global_step_N/actor` of a run of the stack 2025.
        rank: of any layout.

    Raises:
        CheckpointError: on every rank where one finds a fault.
    """
    files = _on_all_ranks(lambda: _checked(folder, rank))
    with torch.no_grad():
        fill_weights(files, rank, lambda _: None)
        fill_optimizer(files, rank, lambda _: None)
    dist.barrier()


def _checked(folder: Path, rank: TrainingRank) -> TrainingFiles:
    """The files, once this rank has found that they hold what it needs, and are what was written."""
    files = open_training_files(folder, rank.shapes)
    check_states(folder, files, rank)
    manifest = complete_manifest(folder)
    mine = sorted(manifest.files)[rank.rank :: rank.world_size]  # all ranks together hash every file once
    check_digests(
        folder, manifest.files, {name: hash_file(folder / name, lambda _: None) for name in mine}, MANIFEST_NAME
    )
    return files


def _on_all_ranks(action: Callable[[], TrainingFiles]) -> TrainingFiles:
    """What `action` returns, when it has returned on all ranks."""
    found: TrainingFiles | None = None
    problem = ""
    try:
        found = action()
    except (CheckpointError, OSError, ValueError) as error:
        problem = str(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((each for each in problems if each), "")
    if first or found is None:
        raise CheckpointError(first)
    return found


class AnyLayoutManager:
    """verl's checkpoint manager, which loads other layouts' files, and the stack 2025's, too.

    Args:
        manager: verl's, which does everything else.
        rank: returns the rank of the engine.
    """

    def __init__(self, manager: Any, rank: Callable[[], TrainingRank]) -> None:
        self._manager, self._rank = manager, rank

    def load_checkpoint(self, local_path: str, **named: Any) -> None:
        """As upstream where upstream can; elsewhere random numbers stay as they are.

        Raises:
            CheckpointError: a file is missing, or is not what was written.
        """
        folder, manager = Path(local_path), self._manager
        saved = ranks_that_saved(folder)
        if (folder / MANIFEST_NAME).is_file():
            load_training(folder, self._rank())
            # verl takes a step of the schedule with each of the trainer's.
            place(manager.lr_scheduler, int(folder.parent.name.rpartition("_")[2]))
        elif saved not in (None, dist.get_world_size()):
            SavedRanks(folder, saved).load(manager.model, manager.optimizer, manager.lr_scheduler)
            dist.barrier()
        else:
            self._load_own(local_path, **named)

    def _load_own(self, local_path: str, **named: Any) -> None:
        self._manager.load_checkpoint(local_path=local_path, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def place(scheduler: Any, steps: int) -> None:
    """Go on as after `steps` steps of a schedule, torch's or Megatron-core's."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        set_place_in_schedule(scheduler, steps)
    elif scheduler is not None:
        scheduler.num_steps = 0
        scheduler.step(increment=steps)
