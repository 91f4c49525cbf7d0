"""The records of a run that goes on: those of steps that are trained again are taken back."""

from __future__ import annotations

import json
import os
from pathlib import Path

from post_training.checkpoint.durable import write_text_durably

BY_STEP = ("metrics.jsonl", "faults.jsonl", "alerts.jsonl")


def take_back_steps(folder: str, step: int) -> None:
    """Keep of the run's records in `folder` those of steps up to `step`; an unfinished last line goes too.

    Each file is replaced at once. An empty `folder` has no records.
    """
    for name in BY_STEP if folder else ():
        path = Path(folder) / name
        if not path.exists():
            continue
        complete, _, _ = path.read_text().rpartition("\n")
        kept = [line for line in complete.splitlines() if (json.loads(line)["step"] or 0) <= step]
        write_text_durably(path, "".join(f"{line}\n" for line in kept))
        os.chmod(path, 0o644)
