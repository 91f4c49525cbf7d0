"""Tells which folders `global_step_N` of a verl 0.9 run are complete checkpoints. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from post_training.checkpoint.complete_files import check_files
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.step_files import TRAINER_NAME, complete_manifest

TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""verl's own file beside the folders, by which trainer.resume_mode=auto finds one."""
_FOLDER = re.compile(r"global_step_(\d+)")


def check_complete(folder: Path) -> int:
    """Return the step that a folder holds.

    Raises:
        CheckpointError: it is no folder of a step, or it is not complete; the message names the missing or cut file.
    """
    found = _FOLDER.fullmatch(folder.name)
    if found is None or not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint: no folder with a name such as global_step_20")
    if (folder / TRAINER_NAME).is_file():  # of the stack 2025
        complete_manifest(folder)
        return int(found[1])
    check_files(folder)
    return int(found[1])


def newest_complete(checkpoints: Path, logged: int | None = None) -> tuple[Path | None, list[str]]:
    """Return the folder of the newest complete step, and a sentence for each newer one that is skipped.

    Args:
        checkpoints: `trainer.default_local_dir`.
        logged: the last step whose metrics the run has, as verl saves before it logs. None also accepts a step without
            metrics.
    """
    skipped = []
    folders = [path for path in checkpoints.glob("global_step_*") if _FOLDER.fullmatch(path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name.rpartition("_")[2]), reverse=True):
        try:
            step = check_complete(folder)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if logged is None or step <= logged:
            return folder, skipped
        skipped.append(f"{folder} is complete, but the run ended before the metrics of its step were logged")
    return None, skipped


def tracked_step(checkpoints: Path) -> int | None:
    """Return the step that verl's `auto` resumes; None if there is none.

    Raises:
        CheckpointError: verl's tracker file is damaged, for example because a save was killed while writing it.
    """
    try:
        text = (checkpoints / TRACKER_NAME).read_text()
    except FileNotFoundError:
        return None
    if not text.strip().isdecimal():
        raise CheckpointError(f"{checkpoints / TRACKER_NAME} is damaged: {text[:20]!r} is not a step")
    return int(text)
