"""Processes on one die share blocks of memory, and HCCL rejects communicators of two ranks on one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from post_training.ports import reserve_ports

PACKAGE = "tests.stack_2026.npu_emulator"


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"{PACKAGE}.{program}", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output[-2000:] + errors[-4000:]
    return output


@pytest.fixture(scope="module")
def shared() -> dict:
    return json.loads(ended(start("shared_blocks_program")).splitlines()[-1])


def test_tensor_of_another_process_is_read_and_written(shared):
    assert shared["mean"] == pytest.approx(shared["expected mean"]) and shared["same"]
    assert shared["written"] == 7 and shared["address kept"]


def test_shared_memory_is_charged_to_its_owner_once(shared):
    """The importer only pays for the blocks of its mean, 2 MiB each, and the die's free memory shrinks by as much."""
    assert shared["own"] == shared["free"] < 3 * 2 * 2**20


def test_copies_from_shared_memory_are_counted_on_the_device(shared):
    assert shared["copied"] == 2 * shared["shape"][0]


def test_key_of_no_process_is_rejected_by_name(shared):
    assert "process 999999999 does not run here" in shared["unknown"]


@pytest.mark.parametrize(("devices", "outcome"), [((0, 1), "sum [3.0, 3.0, 3.0, 3.0]"), ((1, 1), "rejected")])
def test_communicator_has_one_rank_of_a_device(devices, outcome):
    port = reserve_ports()
    processes = [start("one_device_program", rank, port, device) for rank, device in enumerate(devices)]
    heard = [ended(process).splitlines()[-1] for process in processes]
    assert all(line.startswith(outcome) for line in heard)
    assert outcome != "rejected" or all("EI0014: ranks 0 and 1" in line and "die 1" in line for line in heard)
