"""Loads checkpoints into verl's engines that verl itself cannot load: docs/checkpoints.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.filling import checked_files, fill_optimizer, fill_weights
from post_training.checkpoint.manifest import MANIFEST_NAME
from post_training.checkpoint.resumed_rate import set_place_in_schedule
from post_training.checkpoint.training_files import MASTER, MOMENTS, TrainingFiles
from post_training.checkpoint.training_rank import TrainingRank
from verl_plugin.resume.fsdp2_files import SavedRanks, ranks_that_saved


def load_training(folder: Path, rank: TrainingRank, model: bool = True, optimizer: bool = True) -> None:
    """Fill this rank's weights and optimizer; every rank calls it.

    Nothing is written into any rank before all files have been found whole by all ranks, and none returns before all
    have read theirs.

    Args:
        folder: `global_step_N/actor` of a run of the stack 2025.
        rank: this rank, in any layout.
        model: fill the weights, and the float32 elements that the optimizer updates.
        optimizer: fill its averages and its number of updates; without them it begins anew if `model` is filled.

    Raises:
        CheckpointError: on every rank, if one of them finds a fault.
    """
    files = _on_all_ranks(lambda: checked_files(folder, rank, lambda _: None))
    _on_all_ranks(lambda: _fill(files, rank, model, optimizer))


@torch.no_grad()
def _fill(files: TrainingFiles, rank: TrainingRank, model: bool, optimizer: bool) -> None:
    if model:
        fill_weights(files, rank, lambda _: None)
    if states := ((MASTER,) if model else ()) + (MOMENTS if optimizer else ()):
        fill_optimizer(files, rank, lambda _: None, states)


def _on_all_ranks(action: Callable[[], Any]) -> Any:
    """Return `action()` once it has returned on all ranks. Raises CheckpointError on all ranks if it fails on one."""
    found, problem = None, ""
    try:
        found = action()
    except (CheckpointError, OSError, ValueError) as error:
        problem = str(error) or repr(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for each in filter(None, problems):
        raise CheckpointError(each)
    return found


class AnyLayoutManager:
    """verl's checkpoint manager, which also loads files of other layouts and of the stack 2025.

    Args:
        manager: verl's, which does everything else.
        rank: returns the rank of the engine.
    """

    def __init__(self, manager: Any, rank: Callable[[], TrainingRank]) -> None:
        self._manager, self._rank = manager, rank

    def load_checkpoint(self, local_path: str, **named: Any) -> None:
        """Load as upstream where upstream can; otherwise random states stay as they are.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        folder, manager = Path(local_path), self._manager
        saved = ranks_that_saved(folder)
        if (folder / MANIFEST_NAME).is_file():
            load_training(folder, self._rank(), manager.should_load_model, manager.should_load_optimizer)
            if self.should_load_schedule:
                # verl advances the schedule once for each step of the trainer.
                place(manager.lr_scheduler, int(folder.parent.name.rpartition("_")[2]))
        elif saved not in (None, dist.get_world_size()):
            files = SavedRanks(folder, saved)
            model, optimizer, schedule = (
                part if is_wanted else None  # by checkpoint.load_contents
                for part, is_wanted in (
                    (manager.model, manager.should_load_model),
                    (manager.optimizer, manager.should_load_optimizer),
                    (manager.lr_scheduler, self.should_load_schedule),
                )
            )
            _on_all_ranks(lambda: files.load(model, optimizer, schedule))
        else:
            self._load_own(local_path, **named)

    @property
    def should_load_schedule(self) -> bool:
        """Whether `checkpoint.load_contents` names the part of a checkpoint in which verl saves the schedule."""
        return bool(self._manager.should_load_extra)

    def _load_own(self, local_path: str, **named: Any) -> None:
        self._manager.load_checkpoint(local_path=local_path, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def place(scheduler: Any, steps: int) -> None:
    """Set a schedule, torch's or Megatron-core's, to where it is after `steps` steps."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        set_place_in_schedule(scheduler, steps)
    elif scheduler is not None:
        scheduler.num_steps = 0
        scheduler.step(increment=steps)
