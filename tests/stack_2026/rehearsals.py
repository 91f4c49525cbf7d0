"""Runs rehearsals on the 2026 stack for tests, and reads their output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.shared_templates import started_with

# Limit, in float32, on the mean differences of sampled tokens' probabilities and of answers' mean log-probs.
MEAN_DIFFERENCE = 1e-3
STEPS = 2
PROMPTS, ANSWERS = 8, 8
MICRO_BATCH = 16
# A quarter of a rehearsal's prompts, in the same number of micro-batches, with its number of answers.
SMALL_BATCH = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
    *(f"actor_rollout_ref.{part}.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}" for part in ("ref", "rollout")),
)


def rehearse(output: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `STEPS` steps of `SMALL_BATCH`, unless the arguments say otherwise; `environment` extends this process's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, overrides = arguments[:end], arguments[end + 1 :]
    batch = () if "--job" in options else SMALL_BATCH  # a job has sizes of its own
    return command("--output", str(output), "--steps", str(STEPS), *options, "--", *batch, *overrides, **environment)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the rehearsal's program, whose training is forked from a template of the tests if there is one for it."""
    line = [sys.executable, "-m", "tests.stack_2026.shared_training", *arguments]
    return subprocess.run(line, env=started_with(os.environ) | environment, capture_output=True, text=True, timeout=900)


def summary_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text())


def check_computes_alike(
    run: subprocess.CompletedProcess[str], output: Path, log_prob_difference: float = MEAN_DIFFERENCE
) -> None:
    """Check that a rehearsal completed its steps, and that rollout and training computed the same in them.

    Args:
        run: its process.
        output: its folder.
        log_prob_difference: limit on the mean difference of answers' mean log-probs.
    """
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    summary = summary_of(output)
    assert summary["steps"] == STEPS and 0 < summary["rollout_prob_diff_mean"] < MEAN_DIFFERENCE
    assert 0 < summary["rollout_log_prob_diff_mean"] < log_prob_difference
    assert (output / "report.html").exists() and "Done in" in run.stdout
