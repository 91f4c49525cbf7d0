"""A supervised run: its command, the folder that all its starts share, and its record of decisions."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from post_training.arguments import absolute
from post_training.disks import describe_full_disk
from post_training.masking import masked
from post_training.overrides import setting
from post_training.plan.fewer_nodes import Layout
from post_training.report.nodes import SUPERVISION
from scripts.supervision.launched_job import with_options
from verl_patches.features.training_checkpoint.step_folders import newest_step

ROOT = Path(__file__).resolve().parents[2]
_OUTPUT, _CHECKPOINTS = "actor_rollout_ref.overlay.measure.output_dir", "trainer.default_local_dir"
_RESUME = "trainer.resume_mode"


@dataclass(frozen=True)
class SupervisedRun:
    """A command that is started until its training ends.

    Attributes:
        given: The words of the command, as its user gave them.
        folder: Holds the run's files and the log of each start. The supervisors of all nodes share it.
        checkpoints: Holds the run's checkpoints.
    """

    given: tuple[str, ...]
    folder: Path
    checkpoints: Path

    @classmethod
    def prepared(cls, command: Sequence[str], output: Path | None) -> SupervisedRun:
        """Make a run whose folders are those of the command's own overrides, or else below `output`."""
        time_of_start = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = _given_path(command, _OUTPUT) or output or ROOT / "outputs" / "supervised" / time_of_start
        folder = absolute(folder)
        checkpoints = absolute(_given_path(command, _CHECKPOINTS) or folder / "checkpoints")
        return cls(tuple(command), folder, checkpoints)

    def command(self, overrides: Mapping[str, int | float], layout: Layout | None = None) -> list[str]:
        """Return the command with our overrides after its own; a launcher takes them after `--`.

        Args:
            overrides: For smaller micro-batches and the like.
            layout: The layout on fewer nodes than the job is configured for; None on all of them.
        """
        own = [*self.own_overrides(overrides), *(layout.overrides if layout else ())]
        is_launcher = any(word.endswith(".sh") for word in self.given)
        separator = ["--"] if is_launcher and "--" not in self.given else []
        given = with_options(self.given, ["--nodes", str(layout.nodes)]) if layout else list(self.given)
        return [*given, *separator, *own]

    def own_overrides(self, overrides: Mapping[str, int | float]) -> list[str]:
        """Return the overrides that name the run's folders and resume it, followed by `overrides`."""
        own = [setting(_OUTPUT, self.folder), setting(_CHECKPOINTS, self.checkpoints), f"{_RESUME}=auto"]
        return [*own, *as_words(overrides)]

    def checkpoint(self) -> int:
        """Return the step of the newest complete checkpoint, 0 if there is none."""
        return newest_step(self.checkpoints)[0] or 0

    def full_disk(self) -> str | None:
        """Return one sentence if a disk that the supervisor or the training writes to has no space left."""
        return describe_full_disk((self.folder, self.checkpoints))

    def record(self, sentence: str, **facts: Any) -> None:
        """Print a sentence, and append it with its facts to the record that the supervisors of all nodes share."""
        print(f"supervise: {sentence}", flush=True)
        entry = {"time": time.time(), "host": os.uname().nodename, **masked({"message": sentence, **facts})}
        file = self.folder / SUPERVISION
        try:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(entry) + "\n")
        except OSError as error:
            print(f"warning: {file} lacks the line above: {error.strerror}", file=sys.stderr)


def as_words(overrides: Mapping[str, int | float]) -> list[str]:
    """Return overrides as words of a command line."""
    return [f"{key}={value}" for key, value in overrides.items()]


def _given_path(command: Sequence[str], key: str) -> Path | None:
    """Return the path that the command's own overrides set for a key."""
    found = [word.partition("=")[2] for word in command if word.lstrip("+").startswith(f"{key}=")]
    return Path(found[-1].strip("'\"")) if found and found[-1] else None
