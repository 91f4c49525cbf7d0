"""A rank that cannot read a checkpoint ends the load on all ranks: none waits for it in a collective."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from post_training.checkpoint.files import CheckpointError
from verl_plugin.resume import loading

MANAGER = SimpleNamespace(model=None, optimizer=None, lr_scheduler=None)


def fail(*_: Any) -> None:
    raise OSError(5, "Input/output error")


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What this rank, one of two, tells the other at each agreement."""
    said: list[str] = []

    def gather(into: list[Any], own: str) -> None:
        said.append(own)
        into[:] = [own, ""]

    monkeypatch.setattr(loading, "dist", SimpleNamespace(get_world_size=lambda: 2, all_gather_object=gather))
    return said


@pytest.mark.parametrize("place", ["fill_weights", "fill_optimizer"])
def test_rank_that_cannot_read_tells_the_others(monkeypatch, told, place):
    for name in ("checked_files", "fill_weights", "fill_optimizer"):
        monkeypatch.setattr(loading, name, fail if name == place else lambda *_: None)
    with pytest.raises(CheckpointError, match="Input/output error"):
        loading.load_training(Path("global_step_2", "actor"), SimpleNamespace())
    assert told == ["", "[Errno 5] Input/output error"]


def test_missing_file_of_other_ranks_told_to_the_others(tmp_path, told):
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"world_size": 3}))
    with pytest.raises(CheckpointError, match="model_world_size_3_rank_0.pt is missing"):
        loading.AnyLayoutManager(MANAGER, lambda: None).load_checkpoint(str(tmp_path))
    assert len(told) == 1 and told[0].endswith("rank_0.pt is missing")


def test_fault_of_another_rank_ends_the_load_here(monkeypatch):
    def gather(into: list[Any], own: str) -> None:
        into[:] = [own, "rank 1 has lost its disk"]

    monkeypatch.setattr(loading, "dist", SimpleNamespace(get_world_size=lambda: 2, all_gather_object=gather))
    with pytest.raises(CheckpointError, match="rank 1 has lost its disk"):
        loading._on_all_ranks(lambda: 7)
