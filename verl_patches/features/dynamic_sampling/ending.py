"""Ends a run whose prompts did not last for all of its steps, and saves what it has learnt."""

from __future__ import annotations

import sys
from pathlib import Path
from pprint import pprint
from typing import Any

from verl_patches.features.dynamic_sampling.source import PromptsExhausted
from verl_patches.features.training_checkpoint.step_folders import step_folder
from verl_patches.features.training_checkpoint.trainer import process_publisher


def end_early(trainer: Any, reason: str) -> None:
    """Validate and save the last trained step after verl's loop, as verl does at its last step.

    Raises:
        PromptsExhausted: no step was trained.
    """
    trainer.global_steps -= 1
    step, options = trainer.global_steps, trainer.config.trainer
    if step < 1:
        raise PromptsExhausted(reason)
    print(f"warning: the run ends after step {step}: {reason}", file=sys.stderr, flush=True)
    validated: dict[str, float] = {}
    if trainer.val_reward_fn is not None and options.test_freq > 0 and step % options.test_freq:
        validated = trainer._validate()
        pprint(f"Final validation metrics: {validated}")
    process_publisher().finish()
    if not step_folder(Path(options.default_local_dir), step).exists():
        trainer._save_checkpoint()
        process_publisher().logged(step, validated)
