"""A damaged file is found by exactly one rank, for any number of files and ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.filling import checked_files
from post_training.checkpoint.manifest import Manifest
from post_training.checkpoint.training_files import MASTER, MOMENTS, STEPS, entry_name, file_name, write_file

FILES = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a weight of six rows in the files of three ranks."""
    written = {}
    for rank in range(FILES):
        rows = ((2 * rank, 2 * rank + 2), (0, 4))
        tensors = {entry_name(state, "w", rows): torch.ones(2, 4) for state in (MASTER, *MOMENTS)}
        name = file_name(rank, FILES)
        written[name] = write_file(tmp_path / name, tensors, {STEPS: "2"})
    Manifest({}, files=written, complete=True).write(tmp_path)
    return tmp_path


def complaint(folder: Path, rank: int, ranks: int) -> str:
    """Return a rank's error for the checkpoint, or "" if it finds none."""
    one: Any = SimpleNamespace(shapes={"w": (6, 4)}, shards=[], optimizer_shards=[], rank=rank, world_size=ranks)
    try:
        checked_files(folder, one, lambda _: None)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_flipped_bit_in_any_file_found_by_one_rank(folder, ranks):
    assert not any(complaint(folder, rank, ranks) for rank in range(ranks))
    for number in range(FILES):
        file = folder / file_name(number, FILES)
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (told,) = filter(None, (complaint(folder, rank, ranks) for rank in range(ranks)))
        assert told.startswith(f"{file}: has SHA-256 ")
        file.write_bytes(content)
