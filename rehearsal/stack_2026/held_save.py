"""Holds the training loop after a step was saved and before it is marked as complete, until it is killed there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from rehearsal.stack_2026.resume_proof import REACHED_NAME, STEPS
from verl_plugin.resume.checkpoint_callback import CompleteCheckpoint

# A held process that nobody kills ends by itself.
_HELD_S = 600.0


class HeldSave(CompleteCheckpoint):
    """The `trainer.checkpoint_callback_class` of the run that is killed."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **context: Any
    ) -> None:
        """Save as upstream does, but wait to be killed in the save of the last step."""
        if global_step == STEPS:
            (Path(checkpoint_dir).parent / REACHED_NAME).write_text(f"{os.getpid()}\n")
            time.sleep(_HELD_S)
            sys.exit(f"the process to kill in the save of step {STEPS} was not killed")
        super().on_save(trainer, global_step, checkpoint_dir, async_save, **context)
