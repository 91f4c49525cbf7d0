"""Writing verl's parquet files with one fixed schema, and checking a file against it."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl_patches.features.dataset.records import DataError

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
# What verl reads without a default; the other columns of SCHEMA may be missing in files made elsewhere.
REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes ``rows`` to ``path`` under SCHEMA; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows, schema=SCHEMA)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        pyarrow.parquet.write_table(table, partial)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def check_file(path: Path) -> int:
    """Checks that verl can train on a parquet file and returns its number of rows.

    Raises:
        DataError: the file is missing, no parquet file, empty, or lacks what verl reads. (verl itself fails with a
            KeyError deep inside the reward manager on a file in GSM8K's own columns.)
    """
    if not path.is_file():
        raise DataError(f"The data file {path} does not exist: check the path.")
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file: convert it with scripts/json_to_parquet.py.") from error
    schema = file.schema_arrow
    missing = [column for column in REQUIRED_COLUMNS if column not in schema.names]
    if missing:
        raise DataError(
            f"{path} has the columns {', '.join(schema.names)} and lacks {', '.join(missing)}: convert the original "
            "data with scripts/json_to_parquet.py."
        )
    reward_model = schema.field("reward_model").type
    if not pyarrow.types.is_struct(reward_model) or reward_model.get_field_index("ground_truth") < 0:
        raise DataError(f"{path}: the column reward_model has no field ground_truth, which the rule reward compares.")
    if file.metadata.num_rows == 0:
        raise DataError(f"{path} holds no rows: give a file with at least one row.")
    return file.metadata.num_rows
