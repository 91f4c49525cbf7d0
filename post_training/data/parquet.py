"""Writing verl's parquet files with one fixed schema."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SCHEMA = pyarrow.schema(
    [
        ("data_source", pyarrow.string()),
        ("prompt", pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))),
        ("ability", pyarrow.string()),
        ("reward_model", pyarrow.struct([("style", pyarrow.string()), ("ground_truth", pyarrow.string())])),
        (
            "extra_info",
            pyarrow.struct(
                [
                    ("split", pyarrow.string()),
                    ("index", pyarrow.int64()),
                    ("question", pyarrow.string()),
                    ("solution", pyarrow.string()),
                ]
            ),
        ),
    ]
)


def write_files(files: Mapping[Path, Sequence[dict[str, Any]]]) -> None:
    """Writes rows to each path under SCHEMA.

    No file gets its name before the content of all of them is on the disk: training and test rows of two conversions
    never lie side by side because the second file could not be written.
    """
    partials: dict[Path, Path] = {}
    try:
        for path, rows in files.items():
            table = pyarrow.Table.from_pylist(list(rows), schema=SCHEMA)
            path.parent.mkdir(parents=True, exist_ok=True)
            partials[path] = _partial_file(path)
            pyarrow.parquet.write_table(table, partials[path])
            _to_disk(partials[path])
        for path in files:
            os.replace(partials.pop(path), path)
        for folder in {path.parent for path in files}:
            _to_disk(folder)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _partial_file(path: Path) -> Path:
    """Makes an empty file beside ``path`` under a name that nothing reads."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.fchmod(descriptor, 0o644)
    os.close(descriptor)
    return Path(partial)


def _to_disk(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
