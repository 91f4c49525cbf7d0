"""Two steps of unmodified verl 0.9.1 on emulated dies; updated weights reach vLLM, and it shows where they do not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rehearsal.plan import ROOT

pytestmark = pytest.mark.slow
# Of the probabilities of sampled tokens, and of the answers' mean log-probs, in float32.
MEAN_DIFFERENCE = 1e-3
STEPS = 2
RUNS = [("megatron", "deepseek_v3", 2), ("fsdp2", "qwen3", 1)]


def rehearse(output: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rehearsal.stack_2026", "--output", str(output), "--steps", str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_NODE"):  # of the tests: the rehearsal has its own
        environment.pop(name, None)
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=900)


def summary_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text())


@pytest.mark.parametrize(("backend", "model", "dies"), RUNS)
def test_training_and_rollout_compute_alike(tmp_path, backend, model, dies):
    run = rehearse(tmp_path / "run", "--backend", backend, "--model", model, "--dies", str(dies))
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == STEPS and 0 < summary["rollout_prob_diff_mean"] < MEAN_DIFFERENCE
    assert 0 < summary["rollout_log_prob_diff_mean"] < MEAN_DIFFERENCE
    assert (tmp_path / "run" / "report.html").exists() and "Done in" in run.stdout


def test_weights_that_do_not_arrive_fail_the_run(tmp_path):
    own = {"VERL_USE_EXTERNAL_MODULES": "tests.stack_2026.verl.without_weights"}
    small = ("--backend", "fsdp2", "--model", "qwen3", "--dies", "1", "--steps", "1", "--weights", "naive")
    run = rehearse(tmp_path / "run", *small, **own)
    assert run.returncode == 1 and "Rollout and training compute differently at step 1" in run.stderr
    assert summary_of(tmp_path / "run")["rollout_log_prob_diff_mean"] > 1000 * MEAN_DIFFERENCE
