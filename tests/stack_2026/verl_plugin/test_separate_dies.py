"""verl's checkpoint engine `alltoallv` delivers transformers' weights, and each byte once to the die that serves it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ENGINES_2026
from tests.ranks import run_ranks
from tests.stack_2026.verl_plugin.fsdp_program import BUCKET, write_models

PROGRAM = "tests.stack_2026.verl_plugin.separate_program"
MOST_SENT, MOST_COLLECTIVES, MOST_SECONDS = 1.05, 40, 10
CULPRIT = 1


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("separate")
    write_models(folder)
    return folder


def ran(folder: Path, name: str, silent: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Run a layout, and return the results of each rank, training ranks first."""
    (folder / "run.txt").write_text(name)
    world = sum(map(int, name.rpartition(".")[2].split("+")))
    run_ranks(PROGRAM, world, folder, timeout=300, imported=ENGINES_2026)
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(world) if rank not in silent]


@pytest.fixture(scope="module")
def two_and_two(checkpoints: Path) -> list[dict[str, Any]]:
    return ran(checkpoints, "2+2")


def check(ranks: list[dict[str, Any]], trainers: int, even: bool = True) -> None:
    """Check a case's weights, bytes, memory and collectives."""
    assert [rank["first"] + rank["second"] + rank["moved"] for rank in ranks] == [[]] * len(ranks)
    assert [rank["bytes_received"] for rank in ranks] == [rank["bound"] for rank in ranks]
    assert all(rank["bound"] == 0 for rank in ranks[:trainers]) and all(rank["bound"] for rank in ranks[trainers:])
    assert [rank["bytes_copied"] for rank in ranks] == [0] * len(ranks)
    assert not any(rank["bytes_sent"] for rank in ranks[trainers:])
    sent = [rank["bytes_sent"] for rank in ranks[:trainers]]
    assert not even or max(sent) * len(sent) <= MOST_SENT * sum(sent)
    assert [rank["metrics"]["alltoallv/bytes_sent"] for rank in ranks[:trainers]] == sent
    for rank in ranks:
        # The device's allocator rounds each block up to 512 bytes.
        assert rank["peak"] <= rank["staging_bytes"] + 4 * 512 <= 2 * BUCKET + 4 * 512
        assert rank["collectives"] <= MOST_COLLECTIVES


def test_each_worker_receives_what_it_serves_and_no_more(two_and_two):
    names = [name for name in two_and_two[0] if name != "fails"]
    assert len(names) == 5
    for name in names:
        check([rank[name] for rank in two_and_two], trainers=2)


@pytest.mark.parametrize(("name", "trainers"), [("1+2", 1), ("3+1", 3)])
def test_sides_may_differ_in_size(checkpoints, name, trainers):
    found = ran(checkpoints, name)
    for case in (case for case in found[0] if case != "fails"):
        check([rank[case] for rank in found], trainers)


@pytest.mark.parametrize("name", ["megatron112.2+2", "megatron211.2+1", "megatron121.2+1"])
def test_megatron_sends_from_dies_of_its_own(checkpoints, monkeypatch, name):
    """Split experts, tensors or layers over two dies. Pipeline stages send different amounts."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
    found = ran(checkpoints, name)
    assert len(found[0]) == 2
    for case in found[0]:
        check([rank[case] for rank in found], trainers=2, even="121" not in name)


@pytest.mark.parametrize("name", ["nodes2.2+2", "megatron121.nodes2.2+2"])
def test_weights_that_two_dies_of_a_node_need_enter_it_once(checkpoints, monkeypatch, name):
    """Both workers are on one node, and forward to each other the weights that both need."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
    found = ran(checkpoints, name)
    for case in (case for case in found[0] if case != "fails"):
        ranks = [rank[case] for rank in found]
        assert [rank["first"] + rank["second"] + rank["moved"] for rank in ranks] == [[]] * len(ranks)
        assert [rank["bytes_received"] for rank in ranks] == [rank["bound"] for rank in ranks]
        sent, passed_on = (sum(rank["bytes_sent"] for rank in half) for half in (ranks[:2], ranks[2:]))
        bounds = [rank["bound"] for rank in ranks[2:]]
        assert sent + passed_on == sum(bounds) and all(rank["bytes_sent"] for rank in ranks[2:])
        if case.startswith("qwen3 "):  # each worker serves the whole model
            assert sent == passed_on == bounds[0] == bounds[1]
        for rank in ranks:
            assert rank["peak"] <= rank["staging_bytes"] + 4 * 512 <= 2 * BUCKET + 4 * 512
            assert rank["collectives"] <= MOST_COLLECTIVES


def test_stale_step_named_everywhere_and_never_sampled(two_and_two):
    for rank, found in enumerate(told["fails"] for told in two_and_two):
        assert found["update"]["type"] == "ReshardError"
        assert (
            f"rank {CULPRIT} failed with the weights of step 2, but another rank is at step 3"
            in (found["update"]["text"])
        )
        assert found["next"]["type"] is None
        if rank >= 2:
            assert found["sampling"]["type"] == "WeightsNotWholeError"
            assert (found["sampling again"]["type"], found["differing"]) == (None, [])


def test_dead_training_rank_named_on_both_sides(checkpoints):
    (checkpoints / "dies").touch()
    try:
        found = ran(checkpoints, "2+2", silent=(CULPRIT,))
    finally:
        (checkpoints / "dies").unlink()
    for told in (each["fails"] for each in found):
        assert told["update"]["type"] == "ReshardError" and told["update"]["seconds"] < MOST_SECONDS
        assert f"did not hear from ranks [{CULPRIT}]" in told["update"]["text"]
    assert [told["fails"]["sampling"]["type"] for told in found[1:]] == ["WeightsNotWholeError"] * 2
