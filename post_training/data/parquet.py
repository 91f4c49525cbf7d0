"""Write verl's parquet files with a fixed schema for text, and one for images."""

import json
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

_TEXT = {"dtype": "string", "_type": "Value"}
# datasets reads this metadata and decodes the column `images` to Pillow images, as in the files of verl's geo3k.py.
_FEATURES = {
    "data_source": _TEXT,
    "prompt": [{"role": _TEXT, "content": _TEXT}],
    "images": {"feature": {"_type": "Image"}, "_type": "Sequence"},
    "ability": _TEXT,
    "reward_model": {"style": _TEXT, "ground_truth": _TEXT},
    "extra_info": {
        "split": _TEXT,
        "index": {"dtype": "int64", "_type": "Value"},
        "answer": _TEXT,
        "question": _TEXT,
    },
}
IMAGE_SCHEMA = pyarrow.schema(
    [
        SCHEMA.field("data_source"),
        SCHEMA.field("prompt"),
        ("images", pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))),
        SCHEMA.field("ability"),
        SCHEMA.field("reward_model"),
        (
            "extra_info",
            pyarrow.struct(
                [
                    ("split", pyarrow.string()),
                    ("index", pyarrow.int64()),
                    ("answer", pyarrow.string()),
                    ("question", pyarrow.string()),
                ]
            ),
        ),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def write_files(files: Mapping[Path, Sequence[dict[str, Any]]], schema: pyarrow.Schema = SCHEMA) -> None:
    """Write rows to each path under `schema`.

    Files are renamed to their paths only when the content of all is on the disk, so that a failed write never leaves
    training and test rows of two conversions side by side.
    """
    partials: dict[Path, Path] = {}
    try:
        for path, rows in files.items():
            table = pyarrow.Table.from_pylist(list(rows), schema=schema)
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
    """Create an empty file beside ``path`` under a name that nothing reads."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.fchmod(descriptor, 0o644)
    os.close(descriptor)
    return Path(partial)


def _to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
