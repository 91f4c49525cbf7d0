"""The launchers of the stack 2026 check a job without NPUs, and run it scaled down on emulated dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.plan import DEFAULT_TRAIN_DATA, ROOT
from tests.scripts.cluster_files import SHIPPED_2026, write_cluster_file
from tests.stack_2026.rehearsals import STEPS, rehearse, summary_of
from tests.stack_2026.verl.test_jobs import CLUSTER, DIES_128, DIES_256, ONE_CARD, ONE_NODE, model_folder


def launch(job: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("bash", ROOT / "scripts" / f"train_{job}.sh", *arguments, **variables)


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_NODE", "PYTHONPATH"):  # the tests' values; a run sets its own
        environment.pop(name, None)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


def cluster_file(tmp_path: Path, job: str) -> Path:
    values = {"MASTER_ADDR": "10.0.0.1", "SOCKET_IFNAME": "net0", "MODEL_PATH": model_folder(tmp_path, job)}
    return write_cluster_file(tmp_path / "cluster.env", SHIPPED_2026, NODES=16 if job == DIES_256 else 8, **values)


@pytest.mark.parametrize(
    "job", [ONE_CARD, DIES_256, *(pytest.param(job, marks=pytest.mark.exhaustive) for job in (ONE_NODE, DIES_128))]
)
def test_check_plans_and_starts_nothing(tmp_path, job):
    folder, temporary = model_folder(tmp_path, job), tmp_path / "temporary"
    temporary.mkdir()
    given = ("--check", "--model", folder, "--data", DEFAULT_TRAIN_DATA)
    if job in CLUSTER:
        given = ("--check", "--cluster", cluster_file(tmp_path, job))
    ended = launch(job, *given, TMPDIR=str(temporary))
    assert ended.returncode == 0, ended.stderr
    assert "everything fits" in ended.stdout and "nothing was started" in ended.stdout
    assert not list(temporary.glob("tmp.*"))  # made by mktemp; torch also has a folder there


def test_check_rejects_a_value_in_one_sentence(tmp_path):
    given = ("--check", "--model", model_folder(tmp_path, ONE_CARD), "--data", DEFAULT_TRAIN_DATA)
    ended = launch(ONE_CARD, *given, "--", "data.train_batch_size=0")
    assert ended.returncode == 2 and "data.train_batch_size=0 is invalid" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_rehearsal_of_a_cluster_job_is_that_of_one_node(tmp_path):
    ended = launch(
        DIES_256, "--emulate", "--dry-run", "--steps", "3", "--output", tmp_path / "run", "--", "data.seed=7"
    )
    assert ended.returncode == 0, ended.stderr
    assert f"--config-name={DIES_256}" in ended.stdout and "data.seed=7" in ended.stdout
    assert "trainer.total_training_steps=3" in ended.stdout and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_launcher_runs_its_job_scaled_down_on_an_emulated_die(tmp_path):
    assert_trained(launch(ONE_CARD, "--emulate", "--steps", str(STEPS), "--output", tmp_path), tmp_path, dies=1)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "dies"), [(ONE_NODE, 2), (DIES_256, 4)])
def test_job_runs_scaled_down_on_emulated_dies(tmp_path, job, dies):
    """The rehearsal is the one that the launcher starts, and shares its imports with other tests."""
    overrides = ("--", f"trainer.n_gpus_per_node={dies}")
    own = ("--dry-run", "--steps", str(STEPS), "--output", tmp_path, *overrides)
    started = launch(job, "--emulate", *own)
    plain = run(sys.executable, "-m", "rehearsal.stack_2026", "--job", job, *own)
    assert started.stdout == plain.stdout != ""
    assert_trained(rehearse(tmp_path, "--job", job, *overrides), tmp_path, dies)


def assert_trained(ended: subprocess.CompletedProcess[str], output: Path, dies: int) -> None:
    """Check a job's rehearsal. It computes in bfloat16; alltoallv compares every update bit for bit (`verify`)."""
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    summary = summary_of(output)
    assert summary["steps"] == STEPS and summary["dies"] == dies
    assert 0 < summary["rollout_prob_diff_mean"] < 0.01
    rows = [json.loads(line)["data"] for line in (output / "verl_metrics.jsonl").read_text().splitlines()]
    assert all(row["actor/grad_norm"] > 0 for row in rows if "actor/grad_norm" in row)
