"""Whether a model's prompts may hold images."""

from __future__ import annotations

from pathlib import Path

from post_training.models.families import find_family
from post_training.user_files import FileError, read_object


def reads_images(folder: str | None) -> bool:
    """Return whether the model in a folder reads images; False if it has no config.json here."""
    if folder is None:
        return False
    try:
        family = find_family(read_object(Path(folder).expanduser() / "config.json"))
    except FileError:
        return False
    return family is not None and family.reads_images
