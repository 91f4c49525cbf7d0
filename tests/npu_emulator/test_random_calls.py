"""Calls that documents allow, drawn at random: each succeeds or is rejected, and touches only its tensors' memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_emulator.engine_process import ROOT, finish, start

pytestmark = pytest.mark.slow

# Number of calls -> how many of the 525 operators that are emulated as documented must have accepted one of them.
LEAST_TAKEN = {3_000: 390, 100_000: 450}


def draw(file: Path, seed: int, calls: int, seconds: float, **variables: str) -> dict[str, dict[str, int]]:
    """Return how often each operator accepted a call, or rejected one and where.

    Fails with the number and the operator of a call that goes wrong.
    """
    process = start("random_calls_program", file, seed, calls, NPU_EMULATOR_STRICT="1", **variables)
    try:
        finish(process, seconds)
    except AssertionError as error:
        pytest.fail(f"the call {file.read_text().strip()} of seed {seed} ended the process: {error}")
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("seed", "calls", "seconds"),
    [(1, 3_000, 1500), pytest.param(2, 100_000, 7000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)])],
)
def test_calls_that_documents_allow_are_done_or_rejected(tmp_path, seed, calls, seconds):
    outcomes = draw(tmp_path / "outcomes.json", seed, calls, seconds)
    totals = {name: sum(each.get(name, 0) for each in outcomes.values()) for name in ("taken", "operator refused")}
    taken = [operator for operator, each in outcomes.items() if each.get("taken")]
    print(f"{totals}; {len(taken)} of {len(outcomes)} operators took one")
    assert totals["taken"] == calls
    assert len(taken) >= LEAST_TAKEN[calls]


PLANTED = """
from tests.npu_emulator import random_calls_program as program

elements = program.Call.elements
program.Call.elements = lambda call, dtype, count: elements(call, dtype, max(count - 2, 0))
program.main()
"""


def test_operator_writes_beyond_its_tensors_detected(tmp_path):
    """Each tensor has two elements less than it says."""
    file = tmp_path / "outcomes.json"
    command = [sys.executable, "-W", "ignore", "-c", PLANTED, file, "1", "200"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NPU_EMULATOR_STRICT": "1"}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=600)
    assert ended.returncode == -signal.SIGSEGV
    number, operator = file.read_text().split()
    assert number.isdigit() and operator.startswith("aclnn")
