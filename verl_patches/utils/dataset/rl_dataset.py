"""Patches of verl's data set: it reads parquet files of any release of datasets, and counts the tokens of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from overlay import wrap
from verl_patches.features.compatibility.feature import DATA_FILES, IMAGE_PROMPTS

if TYPE_CHECKING:
    import pyarrow
    from verl.utils.dataset.rl_dataset import RLHFDataset


@wrap(
    "verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize",
    feature=DATA_FILES,
    evidence="executed",
    why="datasets 4 records types of columns in a parquet file that earlier releases do not know and fail on, "
    "although the file's own schema says the same",
    upstream="https://github.com/volcengine/verl/issues/2723",
    remove_when="verl pins datasets 4 or later",
)
def read_files_and_tokenize(upstream: Callable[[RLHFDataset], None], self: RLHFDataset) -> None:
    with _unknown_types_left_out():
        upstream(self)


@contextmanager
def _unknown_types_left_out() -> Iterator[None]:
    """Let a file with unknown types in its metadata have those of its own schema within this context."""
    from datasets import Features

    known = Features.from_arrow_schema

    def from_arrow_schema(schema: pyarrow.Schema) -> Any:
        try:
            return known(schema)
        except ValueError:
            return known(schema.remove_metadata())

    with mock.patch.object(Features, "from_arrow_schema", from_arrow_schema):
        yield


@wrap(
    "verl.utils.dataset.rl_dataset:RLHFDataset._read_files_and_tokenize",
    feature=IMAGE_PROMPTS,
    evidence="executed",
    why="filter_overlong_prompts counts an image as the text <image>, so the run ends at the first prompt that is too "
    "long with the tokens of its images",
    upstream="https://github.com/volcengine/verl/pull/511",
    remove_when="verl's filter counts the processor's tokens of a prompt",
)
def leave_out_prompts_with_too_many_image_tokens(upstream: Callable[[RLHFDataset], None], self: RLHFDataset) -> None:
    upstream(self)
    if self.processor is None or not self.filter_overlong_prompts or self.image_key not in self.dataframe.column_names:
        return
    prompts, images, limit, processor = self.prompt_key, self.image_key, self.max_prompt_length, self.processor

    def fits(row: dict[str, Any]) -> bool:
        from post_training.data.images import prompt_lengths, sizes_in

        return prompt_lengths(processor, [row[prompts]], [sizes_in(row[images])])[0] <= limit

    before = len(self.dataframe)
    # In this process, because the processor's tokenizer must not be forked; no pixel is processed.
    self.dataframe = self.dataframe.filter(fits, desc=f"Filtering images longer than {limit} tokens with their prompts")
    print(f"{before - len(self.dataframe)} prompts have more than {limit} tokens with their images and are dropped")
