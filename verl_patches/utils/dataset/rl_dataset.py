"""verl's data set reads parquet files that any release of datasets has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from overlay import wrap
from verl_patches.features.compatibility.feature import DATA_FILES

if TYPE_CHECKING:
    import pyarrow
    from verl.utils.dataset.rl_dataset import RLHFDataset


@wrap(
    "verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize",
    feature=DATA_FILES,
    evidence="executed",
    why="datasets 4 notes types of columns in a parquet file that earlier releases do not know and fail on, although "
    "the file's own schema says the same",
    upstream="https://github.com/volcengine/verl/issues/2723",
    remove_when="verl pins datasets 4 or later",
)
def read_files_and_tokenize(upstream: Callable[[RLHFDataset], None], self: RLHFDataset) -> None:
    with _unknown_types_left_out():
        upstream(self)


@contextmanager
def _unknown_types_left_out() -> Iterator[None]:
    """Within the block a file whose noted types are unknown has those of its own schema."""
    from datasets import Features

    known = Features.from_arrow_schema

    def from_arrow_schema(schema: pyarrow.Schema) -> Any:
        try:
            return known(schema)
        except ValueError:
            return known(schema.remove_metadata())

    with mock.patch.object(Features, "from_arrow_schema", from_arrow_schema):
        yield
