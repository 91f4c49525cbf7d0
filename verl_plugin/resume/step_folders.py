"""Tells which folders `global_step_N` of a verl 0.9 run are complete checkpoints. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from post_training.checkpoint.durable import write_text_durably
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.step_files import TRAINER_NAME, complete_manifest

COMPLETE_NAME = "complete.json"
"""Written last, with the size of every file."""
TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""verl's own file beside the folders, by which trainer.resume_mode=auto finds one."""
_FOLDER = re.compile(r"global_step_(\d+)")


def write_complete(folder: Path) -> None:
    """Mark a step's folder as complete, with the size of every file in it."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    sizes.pop(COMPLETE_NAME, None)
    write_text_durably(folder / COMPLETE_NAME, json.dumps({"files": sizes}, indent=1) + "\n")


def withdraw_complete(folder: Path) -> None:
    """Remove that mark before the folder's files are replaced."""
    (folder / COMPLETE_NAME).unlink(missing_ok=True)


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
    for name, size in _sizes(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is not complete: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{folder} is not complete: {name} has {path.stat().st_size} bytes instead of {size}")
    return int(found[1])


def _sizes(folder: Path) -> Mapping[str, int]:
    try:
        sizes = json.loads((folder / COMPLETE_NAME).read_text())["files"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not complete: it has no {COMPLETE_NAME}, which is written last, so its save was interrupted"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is not complete: {COMPLETE_NAME} cannot be read") from error
    return sizes


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
