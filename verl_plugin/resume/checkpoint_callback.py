"""Marks a checkpoint as complete; set by `trainer.checkpoint_callback_class`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from post_training.checkpoint.complete_files import write_complete


class CompleteCheckpoint(CheckpointCallback):
    """verl calls it when all workers have saved, and the data loader's state is written."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **context: Any
    ) -> None:
        """Record the folder's files and their sizes, unless workers are still writing."""
        if not async_save:
            write_complete(Path(checkpoint_dir))
