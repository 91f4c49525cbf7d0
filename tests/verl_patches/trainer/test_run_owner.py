"""A run's folders have one owner: entry point, rehearsal and resume proof are rejected beside another run."""

import errno
import io
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from ray.exceptions import RayTaskError
from rich.console import Console

from post_training import claimed_dies, inherited_environment, run_lock
from post_training.processes.command import SignalFlag
from post_training.report.run_error import RunError
from post_training.rewards.failures import RewardError
from post_training.run_lock import FolderInUse, FolderLock
from post_training.start_status import VARIABLE, StartStatus
from rehearsal import stages
from rehearsal.plan import Options, make_plan
from scripts import prove_resume
from verl_patches.trainer import main_ppo

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import sys
from pathlib import Path
from post_training.run_lock import owning
with owning([Path(sys.argv[1])], sys.argv[2]):
    print("owned", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owned():
    """Return a function that makes another process own a folder in a role."""
    holders = []

    def own(folder, role="run"):
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", HOLDER, str(folder), role]
        holders.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams))
        assert holders[-1].stdout.readline() == "owned\n"
        return holders[-1]

    yield own
    for holder in holders:
        holder.communicate()


@pytest.fixture
def runs(monkeypatch):
    """Replace the work of runs. Return a list that counts those that would start Ray, and one that counts ends."""
    begun, concluded = [], []
    monkeypatch.setattr(main_ppo, "_write_resolved", lambda config: None)
    monkeypatch.setattr(main_ppo, "_carry_out", lambda config, workers: begun.append(1) or (0, "", None))
    monkeypatch.setattr(main_ppo, "_conclude", lambda *_: concluded.append(1))
    return begun, concluded


def config(output, checkpoints, save_freq=5):
    trainer = {"default_local_dir": str(checkpoints), "save_freq": save_freq, "resume_mode": "auto"}
    measure = {"output_dir": str(output)}
    return OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"overlay": {"measure": measure}}})


def test_run_into_a_living_runs_output_rejected(tmp_path, owned, runs, capsys, monkeypatch):
    holder = owned(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "status.json"))
    assert main_ppo.run(config(tmp_path, tmp_path / "checkpoints")) == 2
    assert f"error: {tmp_path} is in use by process {holder.pid}" in capsys.readouterr().err and runs == ([], [])
    assert StartStatus.read(tmp_path / "status.json") == StartStatus(phase="ended", exit_reason="in_use")
    holder.communicate()
    assert main_ppo.run(config(tmp_path, tmp_path / "checkpoints")) == 0 and runs == ([1], [1])
    assert StartStatus.read(tmp_path / "status.json") == StartStatus(phase="ended")
    assert main_ppo.run(config(tmp_path, tmp_path / "checkpoints")) == 0


def from_ray(error: Exception) -> Exception:
    """Return the exception of a task as Ray raises it on the driver."""
    return RayTaskError("main_task", f"a trace\n{error}", error).as_instanceof_cause()


@pytest.mark.parametrize(
    "error, code, reason",
    [
        (from_ray(RewardError("the reward function failed twice")), 1, "reward_error"),
        (RunError("the run is not valid", "not_valid"), 1, "not_valid"),
        (RunError("of 23 prompts 0 qualified"), 1, None),
        (from_ray(RuntimeError("NPU out of memory. Tried to allocate 22.00 MiB")), 1, "OOM"),
        (main_ppo.SurroundingsFailed("the disk is full", "full_disk"), 1, "full_disk"),
        (claimed_dies.DiesInUse("die 0 is another job's"), 2, "bad_configuration"),
    ],
)
def test_training_reports_why_it_ended(tmp_path, monkeypatch, error, code, reason):
    def train(config, own):
        raise error

    monkeypatch.setenv(VARIABLE, str(tmp_path / "status.json"))
    for name, stand_in in {
        "connected_ray": nullcontext,
        "_claimed_dies": nullcontext,
        "_watching": nullcontext,
    }.items():
        monkeypatch.setattr(main_ppo, name, lambda *_, made=stand_in: made())
    for name in ("_write_resolved", "_conclude"):
        monkeypatch.setattr(main_ppo, name, lambda *_: None)
    monkeypatch.setattr(main_ppo, "_train", train)
    assert main_ppo.run(config(tmp_path, tmp_path / "checkpoints")) == code
    assert StartStatus.read(tmp_path / "status.json") == StartStatus(phase="ended", exit_reason=reason)


def test_other_output_with_same_checkpoints_rejected(tmp_path, owned, runs, capsys):
    """Two runs with separate files share `trainer.default_local_dir`, in which each would delete the other's files."""
    shared = tmp_path / "checkpoints"
    owned(shared)
    assert main_ppo.run(config(tmp_path / "mine", shared)) == 2
    assert f"error: {shared} is in use by process" in capsys.readouterr().err and runs == ([], [])
    with pytest.raises(FolderInUse):
        main_ppo._check_free(config(tmp_path / "mine", shared))
    assert main_ppo.run(config(tmp_path / "mine", shared, save_freq=-1)) == 0, "it only reads them"


def test_run_that_lost_its_folder_writes_nothing_more(tmp_path, runs, monkeypatch):
    owned = run_lock.Ownership()

    def lose(config, workers):
        owned.lost = "another start has taken it over"
        return 143, "", None

    monkeypatch.setattr(run_lock, "Ownership", lambda: owned)
    monkeypatch.setattr(main_ppo, "_carry_out", lose)
    assert main_ppo.run(config(tmp_path, tmp_path / "checkpoints")) == 143 and runs[1] == []


def test_folder_that_takes_no_file_named_by_its_key(tmp_path, runs, capsys):
    (tmp_path / "file").touch()
    for output, checkpoints, key in (
        (tmp_path / "file" / "out", tmp_path / "a", "actor_rollout_ref.overlay.measure.output_dir"),
        (tmp_path / "out", tmp_path / "file" / "b", "trainer.default_local_dir"),
    ):
        assert main_ppo.run(config(output, checkpoints)) == 2
        assert f"error: {key}=" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["run", "rehearsal"])
def test_rehearsal_into_a_living_runs_folder_rejected(tmp_path, owned, monkeypatch, role):
    """A training that was started without a rehearsal is found too, and the rehearsal here resumes a run."""
    owned(tmp_path, role)
    monkeypatch.setattr(stages, "check_before_anything", lambda plan: None)
    plan = replace(make_plan(Options(output=tmp_path, resumes=True), "now"))
    with SignalFlag() as signals, pytest.raises(FolderInUse, match="is in use by process"):
        stages.Rehearsal(Console(file=io.StringIO()), signals, 0.0).carry_out(plan)
    assert {each.name for each in tmp_path.iterdir()} == {f".{role}.owner.1"}


def test_second_proof_in_one_folder_rejected(tmp_path, owned, capsys):
    owned(tmp_path, "proof")
    assert prove_resume.main(["--config-name", "rehearsal", "--output", str(tmp_path)]) == 2
    assert "is in use by process" in capsys.readouterr().err
    FolderLock(tmp_path, "run").check_free()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a machine with four dies that nobody uses."""
    devices = [tmp_path / f"davinci{number}" for number in range(4)]
    monkeypatch.setattr(claimed_dies, "devices_of_dies", lambda root: devices)
    monkeypatch.delenv(inherited_environment.VISIBLE, raising=False)


def with_ray(config, address, dies=2):
    trainer = {"nnodes": 1, "n_gpus_per_node": dies}
    return OmegaConf.merge(config, {"ray_init": {"address": address}, "trainer": trainer})


def test_run_whose_dies_another_job_has_rejected(tmp_path, machine, monkeypatch, capsys):
    """Both the check and the run itself reject it; a Ray that somebody else has started manages its dies itself."""
    local = with_ray(config(tmp_path, tmp_path / "checkpoints"), "local")
    for name in ("_conclude", "_write_resolved"):
        monkeypatch.setattr(main_ppo, name, lambda *_: None)
    monkeypatch.setattr(main_ppo, "connected_ray", lambda *_: pytest.fail("no Ray is started"))
    with claimed_dies.claimed_dies(1, {inherited_environment.VISIBLE: "1"}):
        with pytest.raises(claimed_dies.DiesInUse):
            main_ppo._check_free(local)
        assert main_ppo.run(local) == 2
        said = capsys.readouterr().err
        assert f"error: {inherited_environment.VISIBLE} (not set: dies 0 to 1) is invalid: process" in said
        assert "has die 1" in said and "Set it to 0,2, which are free" in said
        main_ppo._check_free(with_ray(config(tmp_path, tmp_path / "checkpoints"), "10.0.0.1:6379"))
    main_ppo._check_free(local)


def test_closed_folder_of_another_user_is_one_sentence(tmp_path, monkeypatch, capsys):
    def closed(lock):
        raise PermissionError(errno.EACCES, "Permission denied", str(lock.folder))

    output = tmp_path / "out"
    key = "actor_rollout_ref.overlay.measure.output_dir"
    line = ["--config-name", "rehearsal", "--check", f"{key}={output}"]
    monkeypatch.setattr(run_lock.FolderLock, "check_free", closed)
    for check in ("check_machine", "check_configuration"):
        monkeypatch.setattr(f"verl_patches.trainer.configuration_checks.{check}", lambda *_: None)
    monkeypatch.setattr("post_training.data.inspection.check_configured_files", lambda *_: None)
    monkeypatch.setattr("verl_patches.trainer.configuration_checks.images.reads_images", lambda _: False)
    assert main_ppo.main(line) == 2
    said = capsys.readouterr().err
    assert f"{key}={output} is invalid: not writable (Permission denied). Choose a writable folder" in said
    assert said.count("\n") == 1
