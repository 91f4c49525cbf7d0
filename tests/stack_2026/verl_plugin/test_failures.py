"""If a rank fails in an update, the others name it in time, and no worker samples from incomplete weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks
from tests.stack_2026.verl_plugin import dead_worker_program
from tests.stack_2026.verl_plugin.failing_program import CULPRIT, WORLD
from tests.stack_2026.vllm_ascend.models import write_checkpoint

SURVIVORS = [rank for rank in range(WORLD) if rank != CULPRIT]
MOST_SECONDS = 10


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    write_checkpoint("qwen3", folder / "qwen3")
    return folder


def outcome(folder: Path, way: str) -> list[dict[str, Any]]:
    """Run the ranks with a fault, and return the results of each surviving rank."""
    (folder / "way.txt").write_text(way)
    run_ranks("tests.stack_2026.verl_plugin.failing_program", WORLD, folder, timeout=240, imported=PYTORCH)
    found = [json.loads((folder / f"failing.{rank}.json").read_text()) for rank in SURVIVORS]
    for told in found:
        assert (told["first"]["type"], told["first"]["differing"]) == (None, [])
    return found


def test_update_without_a_fault_succeeds(checkpoints):
    for told in outcome(checkpoints, "nothing"):
        assert [told[what]["type"] for what in ("second", "worker", "sampling")] == [None] * 3


def test_dead_rank_named_on_the_others(checkpoints):
    for rank, told in zip(SURVIVORS, outcome(checkpoints, "dies"), strict=True):
        assert told["second"]["type"] == "ReshardError" and told["second"]["seconds"] < MOST_SECONDS
        assert f"rank {rank} did not hear from ranks [{CULPRIT}]" in told["second"]["text"]
        assert f"did not hear from ranks [{CULPRIT}]" in told["worker"]["text"]
        assert told["sampling"]["type"] == "WeightsNotWholeError"


def test_raising_rank_named_and_the_next_update_succeeds(checkpoints):
    for told in outcome(checkpoints, "raises"):
        assert f"rank {CULPRIT} failed in bucket 2 of " in told["second"]["text"]
        assert "a planted failure" in told["second"]["text"] and "abandoned update 2" in told["worker"]["text"]
        assert told["sampling"]["type"] == "WeightsNotWholeError"
        assert (told["third"]["type"], told["third"]["differing"], told["sampling again"]["type"]) == (None, [], None)


def updates(folder: Path, way: str) -> list[list[dict[str, Any]]]:
    """Run ranks with verl's sender and workers in processes of their own, and return each rank's updates."""
    (folder / "way.txt").write_text(way)
    for left in (*folder.glob("description.*"), *folder.glob("worker.*.error")):
        left.unlink()
    program, world = dead_worker_program.__name__, dead_worker_program.WORLD
    run_ranks(program, world, folder, timeout=240, imported=PYTORCH)
    return [json.loads((folder / f"dead.{rank}.json").read_text()) for rank in range(world)]


def test_updates_of_living_workers_succeed(checkpoints):
    for of_rank in updates(checkpoints, "nothing"):
        assert [each["text"] for each in of_rank] == [""] * dead_worker_program.UPDATES


@pytest.mark.parametrize(("way", "when"), [("dies", "by its last bucket"), ("absent", "before the first bucket")])
def test_dead_worker_named_on_all_training_ranks(checkpoints, way, when):
    """verl's sender alone would wait for its answer forever."""
    for first, second, third in updates(checkpoints, way):
        assert first["text"] == "" and second["seconds"] < MOST_SECONDS and third["seconds"] < MOST_SECONDS
        assert f"ReshardError: reshard: rank {CULPRIT} failed {when}: the vLLM worker on this die" in second["text"]
        assert "has ended" in second["text"] and "has ended" in third["text"]
        assert f"rank {CULPRIT} failed" in third["text"] and "other rank" not in third["text"]
    # The other worker leaves each update that was given up, and takes the next.
    errors = {path.name: path.read_text() for path in checkpoints.glob("worker.*.error")}
    assert sorted(errors) == [f"worker.{1 - CULPRIT}.{update}.error" for update in (2, 3)]
    assert all("training abandoned update" in text for text in errors.values())


def test_worker_that_raises_ends_no_rank_and_takes_the_next_update(checkpoints):
    for of_rank in updates(checkpoints, "raises"):
        assert [each["text"] for each in of_rank] == [""] * dead_worker_program.UPDATES
    assert [path.name for path in checkpoints.glob("worker.*.error")] == [f"worker.{CULPRIT}.2.error"]
