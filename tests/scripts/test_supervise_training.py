"""The supervisor over a real training on emulated dies, of which something is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from post_training.report.metrics import read_entries
from rehearsal.plan import ROOT, Options, Plan, make_plan
from rehearsal.processes import remove_emulated_dies
from rehearsal.resume_proof.comparison import MEASURED, OF_A_START, compare, metrics_of
from verl_patches.trainer.own_ray import private_folder
from verl_patches.trainer.own_ray.processes import descendants

STEPS, LIMIT_S = 3, 900
SETTINGS = ("trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.logger=[console]")

# Of losses that are reported, with another order of the sums in float32: tests/verl_patches/features/exact_loss.
EXACT_LOSS = {"rel": 1e-5, "abs": 1e-6}
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
SKIPPED = (*MEASURED, *OF_A_START)

pytestmark = pytest.mark.exhaustive("trains eight times")


def planned(output: Path, *more: str) -> Plan:
    return make_plan(Options(steps=STEPS, output=output, overrides=(*SETTINGS, *more)), "supervised")


def train(command: list[str], plan: Plan, meanwhile: Callable[[int], None] = lambda process: None) -> int:
    """Run a command that trains as the plan says; `meanwhile` is called with its process until it has ended."""
    if not plan.checkpoint.exists():
        subprocess.run(plan.checkpoint_command(), check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    with private_folder("supervised", on_removal=remove_emulated_dies) as private:
        environment = os.environ | plan.environment() | {"TMPDIR": str(private), "NPU_EMULATOR_NODE": private.name}
        subprocess.run(plan.data_command(), env=environment, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
        with (plan.output.parent / f"{plan.output.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            until = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < until:
                meanwhile(process.pid)
                time.sleep(0.2)
            if process.poll() is None:
                process.terminate()
            return process.wait(60)


def supervised(plan: Plan, policy: Path, *more: str) -> list[str]:
    policy.write_text("retry_options: {interval_seconds: 1}\n")
    supervise = [sys.executable, "scripts/supervise.py", "--policy", str(policy), "--output", str(plan.output)]
    return [*supervise, "--", *plan.run_command(), *more]


def record_of(plan: Plan) -> list[dict]:
    return [json.loads(line) for line in (plan.output / "supervision.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    plan = planned(tmp_path_factory.mktemp("unbroken") / "run")
    assert train(plan.run_command(), plan) == 0, (plan.output.parent / "run.log").read_text()[-4000:]
    return plan.output


def of_name(below: int, name: str) -> list[int]:
    """The processes below another that are of a program, or run a module."""
    found = []
    for process in descendants(below):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if Path(words[0]).name == name or name in words[1:3]:
            found.append(process)
    return found


def workers(below: int, output: Path) -> list[int]:
    """The processes below another in which patches of verl's worker ran, as the run says."""
    entries = read_entries(output / "patches.jsonl")
    ran = {each["process"] for each in entries if any("megatron_workers" in label for label in each["executed"])}
    return [process for process in descendants(below) if process in ran]


@pytest.mark.parametrize(
    "name, causes",
    [
        ("worker", {"worker_died"}),
        ("raylet", {"ray_died", "worker_died"}),
        ("rehearsal.training", {"worker_died"}),
    ],
)
def test_a_killed_training_comes_to_the_unbroken_ones_end(unbroken, tmp_path, name, causes):
    plan, killed = planned(tmp_path / "run"), []

    def kill(process: int) -> None:
        if not killed and (plan.output / "checkpoints" / "global_step_1").exists():
            found = workers(process, plan.output) if name == "worker" else of_name(process, name)
            killed.extend(found[:1])
            for each in killed:
                os.kill(each, signal.SIGKILL)

    code = train(supervised(plan, tmp_path / "policy.yaml"), plan, kill)
    record = record_of(plan)
    assert killed and code == 0, (tmp_path / "run.log").read_text()[-4000:]
    (failed,) = [entry for entry in record if "cause" in entry]
    assert failed["cause"] in causes
    (again,) = [entry["message"] for entry in record if entry["message"].startswith("again in")]
    went_on_from = int(again.split("the checkpoint of step ")[1].split()[0]) if "checkpoint" in again else 0
    compared = compare(unbroken, plan.output, went_on_from + 1, STEPS)
    assert compared.differing == () and compared.steps == STEPS, compared


def test_memory_that_runs_out_at_the_third_step_changes_no_gradient(tmp_path):
    """Its update gets nine tenths of what it took: too little for a micro batch, and enough for half of one."""
    plan, unbroken = (planned(tmp_path / name, "actor_rollout_ref.overlay.precision=float32") for name in "ab")
    assert train(unbroken.run_command(), unbroken) == 0, (tmp_path / "b.log").read_text()[-4000:]
    expected = metrics_of(unbroken.output)
    plan.output.mkdir()
    (plan.output / "limit").write_text(str(int(0.9 * expected[3]["memory/peak_bytes/update"])))
    command = supervised(plan, tmp_path / "policy.yaml")
    command[command.index("rehearsal.training")] = "tests.scripts.scarce_training"
    code = train(command, plan)
    assert code == 0, (tmp_path / "a.log").read_text()[-4000:]
    (failed,) = [entry for entry in record_of(plan) if "cause" in entry]
    assert (failed["cause"], failed["stage"], failed["step"]) == ("OOM", "update", 2)
    halved = [entry["overrides"] for entry in record_of(plan) if "overrides" in entry]
    assert halved == [{}, {MICRO: 32}]
    found = metrics_of(plan.output)
    ours, theirs = ({name: value for name, value in steps[3].items() if not name.startswith(SKIPPED)}
                    for steps in (found, expected))  # fmt: skip
    assert ours.keys() == theirs.keys() and ours["actor/grad_norm"] > 0
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, **EXACT_LOSS), name
    for step in (1, 2):
        names = [name for name in expected[step] if not name.startswith(SKIPPED)]
        assert [found[step][name] for name in names] == [expected[step][name] for name in names]


def test_a_refused_configuration_is_not_started_again(tmp_path):
    plan = planned(tmp_path / "run")
    assert train(supervised(plan, tmp_path / "policy.yaml", "trainer.save_freq=often"), plan) == 2
    assert [entry.get("cause") for entry in record_of(plan) if "cause" in entry] == ["bad_configuration"]
    assert "trainer.save_freq" in (tmp_path / "run.log").read_text()
