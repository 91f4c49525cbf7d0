"""Find the files of a data set's splits in a folder downloaded from a hub."""

from __future__ import annotations

from pathlib import Path

from post_training.data.records import DataError

_SUFFIXES = (".parquet", ".jsonl", ".json")
# openai/gsm8k contains its problems in two configurations; verl reads main.
_PREFERRED = ("main", "default")


def split_file(folder: Path, split: str) -> Path:
    """Return the one file of a split, such as main/train-00000-of-00001.parquet or train.jsonl.

    Raises:
        DataError: there is no such folder, no such file, or several.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Pass the folder of the downloaded files.")
    visible = (path for path in sorted(folder.rglob(f"{split}*")) if path.suffix in _SUFFIXES)
    found = [path for path in visible if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    preferred = [path for path in found if path.parent.name in _PREFERRED]
    found = preferred or found
    if not found:
        kinds = ", ".join(f"{split}*{suffix}" for suffix in _SUFFIXES)
        raise DataError(f"{folder} has no file of the split {split} ({kinds}). Download the data set again.")
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:4])
        raise DataError(f"{folder} has several files of the split {split} ({names}). Keep one of them in a folder.")
    return found[0]
