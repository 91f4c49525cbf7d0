"""A rank that cannot read a checkpoint ends the load on all ranks, so that none waits for it in a collective."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME
from verl_plugin.resume import loading
from verl_plugin.resume.loading import AnyLayoutManager, place

CONTENTS = {f"should_load_{name}": True for name in ("model", "optimizer", "extra")}
MANAGER = SimpleNamespace(model=torch.nn.Linear(1, 1), optimizer=None, lr_scheduler=None, **CONTENTS)


def fail(*_: Any) -> None:
    raise OSError(5, "Input/output error")


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """The errors that this rank, one of two, sends to the other at each agreement; empty texts are successes."""
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


def warmed_up() -> Any:
    """Make a schedule for two parameter groups, whose learning rates change at each of the first steps."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [each], "lr": rate} for each, rate in zip(parameters, (1e-3, 5e-4), strict=True)]
    rules = [lambda step: min(1.0, step / 9), lambda step: 0.9**step]
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.AdamW(groups), rules)


@pytest.mark.parametrize("steps", [0, 1, 5, 12])
def test_schedule_goes_on_as_after_its_steps(steps):
    stepped, placed = warmed_up(), warmed_up()
    for _ in range(steps):
        stepped.optimizer.step()
        stepped.step()
    place(placed, steps)
    for _ in range(3):
        rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (stepped, placed)]
        assert rates[0] == rates[1] and stepped.get_last_lr() == placed.get_last_lr()
        for each in (stepped, placed):
            each.optimizer.step()
            each.step()


def test_schedule_of_megatron_counts_from_the_beginning():
    class Schedule:
        num_steps = 4

        def step(self, increment: int) -> None:
            self.num_steps += increment

    schedule = Schedule()
    place(schedule, 7)
    assert schedule.num_steps == 7
    place(None, 7)  # an engine that does not train


class UpstreamManager:
    """Stand-in for verl's manager that records its calls."""

    model, optimizer, lr_scheduler = "model", "optimizer", "schedule"
    should_load_model = should_load_optimizer = should_load_extra = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def load_checkpoint(self, **named: Any) -> None:
        self.asked.append(named)


@pytest.mark.parametrize(("saved", "loads"), [(None, "verl"), (2, "verl"), (3, "other ranks"), (1, "other ranks")])
def test_checkpoint_goes_to_whoever_can_load_it(monkeypatch, tmp_path, told, saved, loads):
    """On two ranks, verl loads checkpoints that two ranks saved, and those that no FSDP engine saved."""
    folder, manager, filled = tmp_path / "global_step_12" / "actor", UpstreamManager(), []
    folder.mkdir(parents=True)
    if saved:
        (folder / "fsdp_config.json").write_text(json.dumps({"world_size": saved}))
    files = lambda folder, ranks: SimpleNamespace(load=lambda *given: filled.append((folder, ranks, *given)))  # noqa: E731
    monkeypatch.setattr(loading, "SavedRanks", files)
    AnyLayoutManager(manager, lambda: None).load_checkpoint(str(folder), del_local=True)
    verls = [{"local_path": str(folder), "del_local": True}]
    others = [(folder, saved, "model", "optimizer", "schedule")]
    assert (manager.asked, filled) == ((verls, []) if loads == "verl" else ([], others))


CONTENT_NAMES = ("model", "optimizer", "extra")


@pytest.mark.parametrize("absent", CONTENT_NAMES)
def test_contents_that_are_not_to_be_loaded_stay(monkeypatch, tmp_path, told, absent):
    """verl's actor.checkpoint.load_contents holds on other numbers of ranks too."""
    folder, manager, filled = tmp_path / "global_step_12" / "actor", UpstreamManager(), []
    folder.mkdir(parents=True)
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 3}))
    setattr(manager, f"should_load_{absent}", False)
    monkeypatch.setattr(loading, "SavedRanks", lambda *_: SimpleNamespace(load=lambda *given: filled.extend(given)))
    AnyLayoutManager(manager, lambda: None).load_checkpoint(str(folder))
    names = {"model": "model", "optimizer": "optimizer", "extra": "schedule"}
    assert filled == [None if part == absent else name for part, name in names.items()]


@pytest.mark.parametrize("step", [3, 12])
def test_checkpoint_of_2025_sets_the_step_of_its_folder(monkeypatch, tmp_path, step):
    folder, manager, loaded = tmp_path / f"global_step_{step}" / "actor", UpstreamManager(), []
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text("{}")
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 2}))
    monkeypatch.setattr(loading, "load_training", lambda *given: loaded.append(given))
    manager.lr_scheduler = warmed_up()
    AnyLayoutManager(manager, lambda: "rank").load_checkpoint(str(folder))
    assert loaded == [(folder, "rank", True, True)] and manager.asked == []
    expected = warmed_up()
    place(expected, step)
    assert manager.lr_scheduler.get_last_lr() == expected.get_last_lr()


@pytest.mark.parametrize("absent", CONTENT_NAMES)
def test_contents_that_are_not_to_be_loaded_of_2025_stay(monkeypatch, tmp_path, told, absent):
    folder, manager, filled = tmp_path / "global_step_12" / "actor", UpstreamManager(), []
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text("{}")
    setattr(manager, f"should_load_{absent}", False)
    manager.lr_scheduler = SimpleNamespace(num_steps=5, step=lambda increment: filled.append("schedule"))
    monkeypatch.setattr(loading, "checked_files", lambda *_: "files")
    monkeypatch.setattr(loading, "fill_weights", lambda *_: filled.append("weights"))
    monkeypatch.setattr(loading, "fill_optimizer", lambda files, rank, progress, states: filled.extend(states))
    AnyLayoutManager(manager, lambda: "rank").load_checkpoint(str(folder))
    parts = {"model": ["weights", "master"], "optimizer": ["exp_avg", "exp_avg_sq"], "extra": ["schedule"]}
    assert filled == [each for name in CONTENT_NAMES if name != absent for each in parts[name]]
