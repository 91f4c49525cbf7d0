"""verl's trainer `separate_async` with weights by alltoallv: one die trains while the other one generates.

Each update is compared bit for bit (`verify`). If nothing is generated ahead, rollout and training compute the same
after each update, which would fail with the previous step's weights.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stack_2026.rehearsals import MEAN_DIFFERENCE, rehearse

pytestmark = pytest.mark.slow
SMALL = ("--model", "qwen3", "--backend", "fsdp2", "--dies", "2", "--rollout-dies", "1", "--steps", "3")
STALENESS = "training/off_policy/trajectory_staleness/mean"
APART = "rollout_corr/log_ppl_abs_diff"


def ran(folder: Path, ahead: int) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    run = rehearse(folder, *SMALL, "--", f"trainer.v1.separate_async.num_warmup_batches={ahead}")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run, [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_batch_ahead_is_of_the_step_before(tmp_path):
    run, steps = ran(tmp_path / "run", ahead=1)
    assert "Done in" in run.stdout and [step[STALENESS] for step in steps] == [0, 1, 1]
    assert steps[0][APART] < MEAN_DIFFERENCE < min(step[APART] for step in steps[1:])
    assert all(step["alltoallv/bytes_sent"] > 0 for step in steps)


def test_rollout_on_its_own_die_has_each_updates_weights(tmp_path):
    _, steps = ran(tmp_path / "run", ahead=0)
    assert [step[STALENESS] for step in steps] == [0, 0, 0] and all(step[APART] < MEAN_DIFFERENCE for step in steps)
