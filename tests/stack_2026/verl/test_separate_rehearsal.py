"""verl's trainer `separate_async` with weights by alltoallv: one die trains while the other one generates.

Each update is compared bit for bit (`verify`). If nothing is generated ahead, rollout and training compute the same
after each update, which would fail with the previous step's weights. With several optimizer steps between two weight
updates, verl takes old log-probs from the weights that the rollout has; the control takes them from the newest.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stack_2026.rehearsals import MEAN_DIFFERENCE, PROMPTS, rehearse

pytestmark = pytest.mark.slow
DIES = ("--dies", "2", "--rollout-dies", "1")
SMALL = ("--model", "qwen3", "--backend", "fsdp2", *DIES, "--steps", "3")
AHEAD = "trainer.v1.separate_async.num_warmup_batches"
# Optimizer steps between two weight updates.
STEPS_OF_UPDATE = 4
SEVERAL = (
    f"trainer.v1.separate_async.parameter_sync_step={STEPS_OF_UPDATE}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // STEPS_OF_UPDATE}",
)
STALENESS = "training/off_policy/trajectory_staleness/mean"
SPANS = "training/off_policy/trajectory_spans/max"
APART = "rollout_corr/log_ppl_abs_diff"
NOTED, NEWEST = (f"tests.stack_2026.verl.{name}" for name in ("noted_updates", "newest_weights"))


def ran(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Return an ended rehearsal and the metrics of its steps."""
    run = rehearse(folder, *arguments, **environment)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run, [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def noted(folder: Path, *arguments: str, module: str = NOTED) -> tuple[list[dict], list[list[dict[str, Any]]]]:
    """Return the metrics of a rehearsal's steps, and of the optimizer steps in each, which its trainer notes."""
    notes = folder.with_suffix(".jsonl")
    _, steps = ran(folder, *arguments, VERL_USE_EXTERNAL_MODULES=module, UPDATES_FILE=str(notes))
    entries = [json.loads(line) for line in notes.read_text().splitlines()]
    assert entries[0]["weights"] == 0
    # The rest are steps: optimizer steps, and behind them the weight update.
    updates = [place for place, entry in enumerate(entries) if "weights" in entry]
    assert [entries[place]["weights"] for place in updates] == list(range(len(steps) + 1))
    assert updates[-1] == len(entries) - 1
    return steps, [entries[first + 1 : last] for first, last in zip(updates[:-1], updates[1:], strict=True)]


# The three tests at the end check what these three do, and more: several optimizer steps between two weight updates.
@pytest.mark.exhaustive
def test_batch_ahead_is_of_the_step_before(tmp_path):
    run, steps = ran(tmp_path / "run", *SMALL, "--", f"{AHEAD}=1")
    assert "Done in" in run.stdout and [step[STALENESS] for step in steps] == [0, 1, 1]
    assert steps[0][APART] < MEAN_DIFFERENCE < min(step[APART] for step in steps[1:])
    assert all(step["alltoallv/bytes_sent"] > 0 for step in steps)


@pytest.mark.exhaustive
def test_rollout_on_its_own_die_has_each_updates_weights(tmp_path):
    _, steps = ran(tmp_path / "run", *SMALL, "--", f"{AHEAD}=0")
    assert [step[STALENESS] for step in steps] == [0, 0, 0] and all(step[APART] < MEAN_DIFFERENCE for step in steps)


@pytest.mark.exhaustive
def test_several_optimizer_steps_use_a_batch_ahead(tmp_path):
    steps, updates = noted(tmp_path / "run", *SMALL, "--", *SEVERAL, f"{AHEAD}=1")
    assert [len(each) for each in updates] == [STEPS_OF_UPDATE] * 3 and [step[STALENESS] for step in steps] == [0, 1, 1]
    assert all(step["alltoallv/bytes_sent"] > 0 for step in steps)
    assert all(each[APART] < MEAN_DIFFERENCE for each in updates[0])
    assert all(each[APART] > MEAN_DIFFERENCE for of_step in updates[1:] for each in of_step)


def test_old_log_probs_have_the_rollouts_weights(tmp_path):
    steps, updates = noted(tmp_path / "run", *SMALL, "--", *SEVERAL, f"{AHEAD}=0")
    assert [step[STALENESS] for step in steps] == [0, 0, 0] and all(step[SPANS] == 1 for step in steps)
    for first, *others in updates:
        assert len(others) == STEPS_OF_UPDATE - 1
        assert all(each[APART] < MEAN_DIFFERENCE for each in (first, *others))
        # The policy itself has left the rollout's weights.
        assert abs(first["actor/ppo_kl"]) < min(abs(each["actor/ppo_kl"]) for each in others)


def test_newest_weights_leave_the_rollouts(tmp_path):
    _, updates = noted(tmp_path / "run", *SMALL, "--", *SEVERAL, f"{AHEAD}=0", module=NEWEST)
    for first, *others in updates:
        assert first[APART] < MEAN_DIFFERENCE < min(each[APART] for each in others)


def test_megatron_core_trains_while_the_rollout_generates(tmp_path):
    """DeepSeek-V3, whose experts of the rollout are replayed."""
    small = ("--model", "deepseek_v3", "--backend", "megatron", *DIES, "--steps", "2")
    steps, (first, second) = noted(tmp_path / "run", *small, "--", *SEVERAL, f"{AHEAD}=1")
    assert len(first) == len(second) == STEPS_OF_UPDATE and [step[STALENESS] for step in steps] == [0, 1]
    assert all(each[APART] < MEAN_DIFFERENCE for each in first) and steps[1][APART] > MEAN_DIFFERENCE
    assert all(step["rollout/expert_sets_differ"] == 0 and step["alltoallv/bytes_sent"] > 0 for step in steps)
