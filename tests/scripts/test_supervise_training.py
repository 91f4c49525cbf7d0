"""The supervisor over a real training on emulated dies, in which something is killed, stopped or taken away."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from post_training.processes.descendants import descendants
from rehearsal.emulated_dies import remove_emulated_dies
from rehearsal.plan import ROOT, Options, RehearsalPlan, make_plan
from rehearsal.resume_proof.comparison import MEASURED, compare, metrics_of
from tests.scripts.namespaces import on_small_disk, reason_why_not
from verl_patches.features.measure.run_files import read_patches
from verl_patches.trainer.isolated_ray import private_folder

STEPS, LIMIT_S = 3, 900
SETTINGS = ("trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.logger=[console]")

# Tolerance of reported losses when float32 sums are in another order: tests/verl_patches/features/exact_loss.
EXACT_LOSS = {"rel": 1e-5, "abs": 1e-6}
OUTPUT = "actor_rollout_ref.overlay.measure.output_dir"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"

# A process that does not answer is reported after 15 seconds, and the run is ended after 30.
WATCH = "actor_rollout_ref.overlay.watch"
SOON = (f"{WATCH}.interval_s=1", f"{WATCH}.warn_s.silent=15", f"{WATCH}.end_s.silent=30")
NAMED = r"rank [0-3] \(process {} on \S+\) has not answered for \d+ s"

pytestmark = pytest.mark.exhaustive("trains fourteen times")


def planned(output: Path, *more: str) -> RehearsalPlan:
    return make_plan(Options(steps=STEPS, output=output, overrides=(*SETTINGS, *more)), "supervised")


def make_model(plan: RehearsalPlan) -> Path:
    """Return the folder of the tiny model that a plan trains, making it if necessary."""
    if not plan.checkpoint.exists():
        subprocess.run(plan.checkpoint_command(), check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    return plan.checkpoint


def train(command: list[str], plan: RehearsalPlan, meanwhile: Callable[[int], None] = lambda process: None) -> int:
    """Run a command that trains as the plan says; `meanwhile` is called with its process id until it ends."""
    make_model(plan)
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


def supervised(plan: RehearsalPlan, policy: Path, *more: str) -> list[str]:
    policy.write_text("retry_options: {interval_seconds: 1}\n")
    supervise = [sys.executable, "scripts/supervise.py", "--policy", str(policy), "--output", str(plan.output)]
    return [*supervise, "--", *plan.run_command(), *more]


def record_of(plan: RehearsalPlan) -> list[dict]:
    return [json.loads(line) for line in (plan.output / "supervision.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    plan = planned(tmp_path_factory.mktemp("unbroken") / "run")
    assert train(plan.run_command(), plan) == 0, (plan.output.parent / "run.log").read_text()[-4000:]
    return plan.output


def of_name(below: int, name: str) -> list[int]:
    """Return the descendants of a process that run a program or a module of this name."""
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
    """Return the descendants of a process that are verl's rank workers according to the run, without the trainer."""
    entries = read_patches(output)
    ran = {each["process"] for each in entries if any("RolloutRefWorker.__init__" in name for name in each["executed"])}
    return [process for process in descendants(below) if process in ran]


@pytest.mark.parametrize(
    "name, number, cause, said, settings",
    [
        ("worker", signal.SIGKILL, "worker_died", "", ()),
        ("worker", signal.SIGSTOP, "hang", NAMED, SOON),
        ("raylet", signal.SIGKILL, "ray_died", "its process raylet has gone", ()),
        ("rehearsal.training", signal.SIGKILL, "worker_died", "ended by signal 9", ()),
    ],
)
def test_a_training_that_loses_something_comes_to_the_unbroken_ones_end(
    unbroken, tmp_path, name, number, cause, said, settings
):
    plan, lost = planned(tmp_path / "run", *settings), []

    def take(process: int) -> None:
        if not lost and (plan.output / "checkpoints" / "global_step_1").exists():
            found = workers(process, plan.output) if name == "worker" else of_name(process, name)
            lost.extend(found[:1])
            for each in lost:
                os.kill(each, number)

    code = train(supervised(plan, tmp_path / "policy.yaml"), plan, take)
    record = record_of(plan)
    assert lost and code == 0, (tmp_path / "run.log").read_text()[-4000:]
    (failed,) = [entry for entry in record if "cause" in entry]
    assert failed["cause"] == cause and re.search(said.format(lost[0]), failed["message"]), failed
    assert sum(entry["message"].startswith("again in") for entry in record) == 1
    compared = compare(unbroken, plan.output, STEPS)
    assert compared.differing == () and compared.steps == STEPS, compared


FAILING_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("the sandbox did not answer")
"""


def given_up(tmp_path: Path, *settings: str) -> dict:
    """Return the recorded failure of a training with these settings, which must fail after a single start."""
    plan = planned(tmp_path / "run", *settings)
    assert train(supervised(plan, tmp_path / "policy.yaml"), plan) == 1, (tmp_path / "run.log").read_text()[-4000:]
    record = record_of(plan)
    assert [entry["start"] for entry in record if "start" in entry] == ["start_1.log"]
    (failed,) = [entry for entry in record if "cause" in entry]
    assert record[-1]["ended"] == 1 and f"{failed['cause']} is not retried" in record[-1]["message"]
    assert len(list(plan.output.glob("failure-*.tar.gz"))) == 1
    return failed


def test_a_reward_function_that_always_fails_is_not_called_again_in_another_start(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(FAILING_REWARD)
    failed = given_up(tmp_path, f"custom_reward_function.path={reward}")
    assert failed["cause"] == "reward_error" and failed["step"] == 0
    assert "the reward function failed twice (ValueError: the sandbox did not answer)" in failed["message"]


def test_weights_that_are_not_finite_are_not_loaded_again(tmp_path):
    model = shutil.copytree(make_model(planned(tmp_path / "unused")), tmp_path / "model")
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    failed = given_up(tmp_path, f"actor_rollout_ref.model.path={model}")
    assert (failed["cause"], failed["step"]) == ("not_valid", 0)
    assert (
        "weights contain inf or nan in module.decoder.layers.1.self_attention.linear_proj.weight" in failed["message"]
    )


def test_a_disk_that_is_full_is_not_written_to_again(tmp_path):
    """The disk is also the supervisor's: it has no room for its record or an archive."""
    reason = reason_why_not()
    if reason:
        pytest.skip(f"NOT RUN, a full disk: {reason}")
    small = tmp_path / "run" / "small"
    places = {OUTPUT: small, "trainer.default_local_dir": small / "checkpoints"}
    plan = planned(tmp_path / "run", *(f"{key}={path}" for key, path in places.items()), "trainer.save_freq=-1")
    small.mkdir(parents=True)
    filled = []

    def fill(process: int) -> None:
        seen = Path(f"/proc/{process}/root{small}")
        metrics = seen / "metrics.jsonl"
        if not filled and metrics.exists() and metrics.read_text().count("\n"):
            with (seen / "filler").open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    filled.append(file.write(bytes(4096)))

    code = train(on_small_disk(small, "8m", *supervised(plan, tmp_path / "policy.yaml")), plan, fill)
    said = (tmp_path / "run.log").read_text()
    assert filled and code == 1, said[-4000:]
    assert said.count("supervise: a start;") == 1 and "Traceback" not in said.split("supervise: it failed")[1]
    assert f"it failed (full_disk): the disk that holds {small}, mounted at {small}, is full" in said, said[-4000:]
    assert "it is not started again: full_disk is not retried" in said
    assert f"what is known lies in {small}, for no archive" in said


def test_memory_that_runs_out_at_the_third_step_changes_no_gradient(tmp_path):
    """The update gets nine tenths of its usual memory: too little for a micro batch, but enough for half of one."""
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
    ours, theirs = ({name: value for name, value in steps[3].items() if not name.startswith(MEASURED)}
                    for steps in (found, expected))  # fmt: skip
    assert ours.keys() == theirs.keys() and ours["actor/grad_norm"] > 0
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, **EXACT_LOSS), name
    for step in (1, 2):
        names = [name for name in expected[step] if not name.startswith(MEASURED)]
        assert [found[step][name] for name in names] == [expected[step][name] for name in names]


def test_a_rejected_configuration_is_not_started_again(tmp_path):
    plan = planned(tmp_path / "run")
    assert train(supervised(plan, tmp_path / "policy.yaml", "trainer.save_freq=often"), plan) == 2
    assert [entry.get("cause") for entry in record_of(plan) if "cause" in entry] == ["bad_configuration"]
    assert "trainer.save_freq" in (tmp_path / "run.log").read_text()
