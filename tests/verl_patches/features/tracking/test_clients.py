"""The trackers' own libraries read back a run that was killed after step 4 and resumed after step 2.

W&B, SwanLab and MLflow are not in the environment, because their packages conflict with its own. These tests run if
requirements/trackers.lock is installed to .venv/trackers (docs/tracking.md); without a network, key or login.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
TRACKERS = ROOT / ".venv" / "trackers"
JOB = Path(__file__).with_name("job.py")
NUMBERS = {"critic/score/mean", "begun", "val/acc@1(数)", "bad"}
WANDBS_OWN = {"_step", "_timestamp", "_runtime"}
needs_clients = pytest.mark.skipif(
    not TRACKERS.is_dir(), reason="NOT RUN: requirements/trackers.lock is not installed in .venv/trackers"
)


def python(*arguments, tmp_path):
    """Run Python in a process with the trackers' packages, but without a home folder, a key or a network."""
    unwanted = ("WANDB", "SWANLAB", "MLFLOW", "TENSORBOARD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = os.pathsep.join([str(TRACKERS), str(ROOT)])
    environment = {**kept, "PYTHONPATH": path, "HOME": str(tmp_path / "home")}
    command = ["unshare", "--net", "--map-root-user", sys.executable, *map(str, arguments)]
    if subprocess.run([*command[:3], "true"], capture_output=True).returncode:
        command = command[3:]  # a container that may not create namespaces
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "warning: the tracker" not in ended.stderr, ended.stderr[-3000:]
    return ended.stdout


def read_by(name, folder, tmp_path):
    """Return what the tracker's own library finds in the folder of a run."""
    return json.loads(python(JOB.with_name("readers.py"), name, folder, tmp_path=tmp_path).splitlines()[-1])


def killed_and_resumed(name, tmp_path, ending="finished"):
    """Kill a run with that tracker and resume it. Return the run's folder, and the ids in its checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    ids = next(
        line for line in python(JOB, folder, name, 1, 4, "none", tmp_path=tmp_path).splitlines() if line[0] == "{"
    )
    python(JOB, folder, name, 2, 5, ending, 2, ids, tmp_path=tmp_path)
    return folder, json.loads(ids)


def test_tensorboard_shows_one_curve(tmp_path, monkeypatch):
    """The killed start never closes its writer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tests.verl_patches.features.tracking import job

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    killed = job.log_steps(tmp_path, "tensorboard", 1, 4)
    killed.tracking.logger["tensorboard"].writer.flush()
    job.log_steps(tmp_path, "tensorboard", 2, 5, {"step": 2, "runs": {}}).close("finished")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)

    def read(purge):
        events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=purge)
        events.Reload()
        assert set(events.Tags()["scalars"]) == NUMBERS
        return [(each.step, each.value) for each in events.Scalars("begun")]

    assert read(True) == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert len(read(False)) == 7  # the control: the events that the resumed start purges are in the file


@needs_clients
@pytest.mark.slow
@pytest.mark.parametrize(("ending", "status"), [("finished", "FINISHED"), ("failed", "FAILED"), ("killed", "KILLED")])
def test_mlflow_has_one_run_with_every_step_once(tmp_path, ending, status):
    folder, ids = killed_and_resumed("mlflow", tmp_path, ending)
    run, found, params, history = read_by("mlflow", folder, tmp_path)
    assert (run, found) == (ids["mlflow"], status)
    assert params["api_key"] == "***" and params["trainer/name"] == "x"
    assert set(history) == {"critic/score/mean", "begun", "val/acc_at_1_数_", "bad"}
    # Steps 3 and 4 were trained again with the same values, and the first entries are kept.
    assert history["begun"] == [[1, 1], [2, 1], [3, 1], [4, 1], [5, 2]]
    assert [step for step, _ in history["bad"]] == [1, 2, 3, 4, 5]


@needs_clients
@pytest.mark.slow
def test_wandb_keeps_one_run_offline(tmp_path):
    folder, ids = killed_and_resumed("wandb", tmp_path)
    found = read_by("wandb", folder, tmp_path)
    assert {each[1] for each in found if each[0] == "run"} == {ids["wandb"]}
    steps = [values for kind, values in found if kind == "history" and values["begun"] == 2]
    # The first start lost its buffer; the second has everything after the checkpoint.
    assert [values["_step"] for values in steps] == [3, 4, 5]
    assert all(set(values) - WANDBS_OWN == NUMBERS for values in steps)


@needs_clients
@pytest.mark.slow
def test_swanlab_keeps_one_run_offline_and_gets_no_nan(tmp_path):
    folder, ids = killed_and_resumed("swanlab", tmp_path, "failed")
    found = read_by("swanlab", folder, tmp_path)
    assert {each[1] for each in found if each[0] == "start"} == {ids["swanlab"]}
    assert [each[1] for each in found if each[0] == "finish"] == [2]  # RUN_STATE_CRASHED
    scalars = [each[1:] for each in found if each[0] == "scalar" and each[1] in NUMBERS]
    assert {name for name, *_ in scalars} == NUMBERS - {"bad"}
    # The first start lost its buffer; the second has everything after the checkpoint.
    assert [step for name, step, value in scalars if name == "begun" and value == 2] == [3, 4, 5]
