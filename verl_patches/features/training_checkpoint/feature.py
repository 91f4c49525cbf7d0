"""The feature training_checkpoint: its purpose, and what verl's keys cannot ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError, Feature

_CONTENTS = ("model", "optimizer", "extra")


def check_resume(config: Mapping[str, Any], settings: Any) -> None:
    """A path goes with the mode that reads it."""
    options = config["trainer"]
    mode, path = options["resume_mode"], options["resume_from_path"]
    if mode == "resume_path" and not path:
        raise ConfigurationError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, the folder global_step_N of a checkpoint"
        )
    if mode != "resume_path" and path:
        raise ConfigurationError(
            f"trainer.resume_from_path={path} has no effect with trainer.resume_mode={mode}; set it to resume_path"
        )


def check_contents(config: Mapping[str, Any], settings: Any) -> None:
    """A checkpoint is whole: what a resume needs, and nothing that can be derived from it."""
    contents = config["actor_rollout_ref"]["actor"]["checkpoint"]["contents"]
    if sorted(contents) != sorted(_CONTENTS):
        raise ConfigurationError(
            f"actor_rollout_ref.actor.checkpoint.contents={list(contents)} is not what a checkpoint holds; leave it "
            f"at {list(_CONTENTS)}"
        )


TRAINING_CHECKPOINT = Feature(
    name="training_checkpoint",
    purpose="Weights and optimizer are saved by HuggingFace name, each element once, and load under any layout.",
    checks=(check_resume, check_contents),
)
