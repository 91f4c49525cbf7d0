"""The hang detector's files in the folder of a run: the processes that stopped, and the run's heartbeat."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from post_training.masking import masked
from post_training.report.heartbeat import HEARTBEAT
from post_training.report.object_files import append_object, replace_object

FAULTS = "faults.jsonl"


class RunRecords:
    """The two files of a folder; their formats are those of `verl_patches.features.measure.run_files`.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fault(self, kind: str, message: str, step: int | None, **facts: Any) -> None:
        """Append a fault; `facts` are further keys."""
        said = masked({"message": message, **facts})
        append_object(self._folder / FAULTS, {"time": time.time(), "kind": kind, "step": step, **said})

    def heartbeat(self, progress: int, step: int | None, process: str, phase: str | None) -> None:
        """Replace the run's heartbeat: the progress of all processes together, and which one made the last."""
        content = {"progress": progress, "time": time.time(), "step": step, "process": process, "phase": phase}
        replace_object(self._folder / HEARTBEAT, content)
