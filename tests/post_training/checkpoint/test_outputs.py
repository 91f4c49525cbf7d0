"""Space and buffer sizes that output files announce before writing are enough for what they write."""

from __future__ import annotations

import pytest
import torch

from post_training.checkpoint.outputs import ArchiveFile, CopiedFile, SafetensorsFile, TextFile
from post_training.checkpoint.records import Record
from post_training.layouts.layout import PADDING, Shard


def record(name, elements):
    """Make a record of zeros, which reads no source."""
    return Record(name, torch.float32, (elements,), (Shard(PADDING, ((0, elements),), name),))


@pytest.fixture
def files(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(bytes(5000))
    small, large = record("small", 3), record("large", 40_000)
    return [
        SafetensorsFile("a.safetensors", [small, large]),
        SafetensorsFile("b.safetensors", [large, small]),
        ArchiveFile("one.pt", {"model": {"small": small, "large": large}, "iteration": 1}),
        ArchiveFile("two.pt", {"model0": {"small": small}, "model1": {"large": large}, "iteration": 1}),
        CopiedFile("tokenizer.json", tmp_path / "tokenizer.json"),
        TextFile("config.json", "\u7b49\u5f85" * 1000),
    ]


def test_space_and_buffer_are_not_less_than_what_is_written(files):
    for file in files:
        chunks = [len(bytes(chunk)) for chunk in file.stream(None)]
        assert sum(chunks) <= file.space < sum(chunks) + 16384, file.path
        assert max(chunks) <= file.buffer, file.path


def test_file_without_tensors_needs_no_buffer():
    for file in (SafetensorsFile("a.safetensors", []), ArchiveFile("a.pt", {"model": {}})):
        assert file.buffer == 0 and sum(len(bytes(chunk)) for chunk in file.stream(None)) <= file.space
