"""Streams with threads of their own: late, and in any order that events allow, drawn from a seed."""

import json
import os
import subprocess
import sys

import pytest

from tests.npu_emulator.engine_process import ROOT, finish, start
from tests.npu_emulator.streams_program import HAZARDS, TRIALS

pytestmark = pytest.mark.slow
SEEDS = [pytest.param(seed, marks=[pytest.mark.exhaustive] if seed > 1 else []) for seed in range(1, 21)]


def seen(folder, **variables: str) -> dict:
    """Run the program with the hazards and return its results."""
    finish(start("streams_program", folder / "seen.json", **variables))
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_orders_streams_is_missed_where_it_is_left_out_and_suffices_where_it_is_not(tmp_path, seed):
    answers = seen(tmp_path, NPU_EMULATOR_STREAM_SEED=str(seed))
    right = {hazard.__name__: answers.pop(hazard.__name__) for hazard in HAZARDS}
    assert {name: times["with"] for name, times in right.items()} == dict.fromkeys(right, TRIALS)
    assert not [name for name, times in right.items() if times["without"] == TRIALS], right
    said = answers.pop("failures")
    assert len(said) == 2 and all("aclnnIndexSelect: index out of range" in each for each in said)
    assert set(answers.values()) == {True}, answers


@pytest.mark.exhaustive
def test_without_a_seed_work_is_done_when_it_is_given(tmp_path):
    """This is the control: no hazard shows."""
    answers = seen(tmp_path, NPU_EMULATOR_STREAM_SEED="", TASK_QUEUE_ENABLE="0")
    assert all(answers[hazard.__name__] == {"without": TRIALS, "with": TRIALS} for hazard in HAZARDS), answers


def give_collectives(folder, order: str, seed: str, limit_s: int) -> list:
    """Return the answers of two ranks that submit collectives of two groups in opposite orders."""
    results = [folder / f"{rank}.json" for rank in range(2)]
    variables = {"HCCL_EXEC_TIMEOUT": str(limit_s), "NPU_EMULATOR_STREAM_SEED": seed}
    processes = [
        start("groups_program", rank, folder / "store", results[rank], order, **variables) for rank in range(2)
    ]
    for process in processes:
        process.wait(200)
        process.stdout.close()
    return [json.loads(result.read_text()) for result in results]


def test_groups_do_not_wait_for_each_other(tmp_path):
    assert give_collectives(tmp_path, "free", "1", 60) == [[3, 21]] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(("order", "seed"), [("chained", "1"), ("free", "")])
def test_ranks_that_do_wait_for_each_other_are_named(tmp_path, order, seed):
    """The same happens if streams do not run by themselves. A device would go on; this shows why they must."""
    answers = give_collectives(tmp_path, order, seed, 8)
    assert all(f"HcclAllReduce on rank {rank} of 2: no answer after" in answers[rank] for rank in range(2)), answers
    assert all(f"from rank {1 - rank} (last in HcclAllReduce)" in answers[rank] for rank in range(2)), answers


@pytest.mark.parametrize("seed", SEEDS)
def test_storages_leave_and_come_back_whole(seed):
    """These are the offload manager's storages; the list of mutants has the control."""
    tests = "tests/verl_patches/features/residency/test_storages.py"
    environment = {**os.environ, "NPU_EMULATOR_STREAM_SEED": str(seed)}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
