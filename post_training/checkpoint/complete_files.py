"""Marks a folder as complete by a list of its files with their sizes, written last. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from post_training.checkpoint.durable import write_text_durably
from post_training.checkpoint.files import CheckpointError

COMPLETE_NAME = "complete.json"
"""Written last, with the size of every file."""


def write_complete(folder: Path) -> None:
    """Mark a step's folder as complete, with the size of every file in it."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    sizes.pop(COMPLETE_NAME, None)
    write_text_durably(folder / COMPLETE_NAME, json.dumps({"files": sizes}, indent=1) + "\n")


def withdraw_complete(folder: Path) -> None:
    """Remove that mark before the folder's files are replaced."""
    (folder / COMPLETE_NAME).unlink(missing_ok=True)


def check_files(folder: Path) -> None:
    """Check that every listed file of a folder is there in its size.

    Raises:
        CheckpointError: it is not complete; the message names the missing or cut file.
    """
    for name, size in _sizes(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is not complete: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{folder} is not complete: {name} has {path.stat().st_size} bytes instead of {size}")


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
