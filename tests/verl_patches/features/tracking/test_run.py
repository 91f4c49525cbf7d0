"""Trackers between verl and their clients: each step is sent once, also over a resume, and none can stop a run."""

import json
import math
import os
import sys
from types import SimpleNamespace

import pytest

from verl_patches.features.tracking import backends
from verl_patches.features.tracking.run import RECORD, RunTrackers, end_left_run

MLFLOW = backends.BACKENDS["mlflow"]


class Scripted:
    """verl's Tracking with trackers that keep what they get; `dies` maps names to the step from which they raise."""

    def __init__(self, tmp_path, *names, dies=None, rejected=(), config=None):
        self.tracking, self.sent, self.configs = SimpleNamespace(logger=None), {}, {}
        self.dies, self.rejected = dies or {}, rejected
        self.trackers = RunTrackers(self.tracking, self.make, names, config or {}, tmp_path)

    def make(self, name, config):
        if name in self.rejected:
            raise ConnectionError("no route to the server\nand more")
        self.configs[name] = config
        self.tracking.logger = {name: SimpleNamespace(writer=SimpleNamespace(close=lambda: None))}

    def send(self, step):
        def give(name, metrics):
            if step >= self.dies.get(name, math.inf):
                raise OSError("disk gone")
            self.sent.setdefault(name, []).append((step, dict(metrics)))

        return give

    def log(self, step, **metrics):
        self.trackers.log(self.send(step), metrics, step)

    def steps(self, name):
        return [step for step, _ in self.sent.get(name, [])]


@pytest.fixture(autouse=True)
def clients(monkeypatch):
    """Replace the clients, whose packages are not needed then; each numbers its runs."""
    ids = iter(range(100))
    known = {
        name: backends.Backend(
            resuming=lambda run: {"FAKE_RUN": run},
            run_id=lambda: str(next(ids)),
            takes_nan=name != "swanlab",
            end=lambda logger, ending: ended.append(ending),
        )
        for name in ("wandb", "swanlab", "mlflow")
    }
    ended = []
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, **known})
    monkeypatch.setenv("FAKE_RUN", "")
    return ended


def test_a_tracker_that_dies_is_dropped_with_one_warning_and_the_others_go_on(tmp_path, capsys):
    run = Scripted(tmp_path, "mlflow", "wandb", "swanlab", dies={"mlflow": 2}, rejected=("wandb",))
    for step in (1, 2, 3, 4):
        run.log(step, a=1.0)
    assert (run.steps("mlflow"), run.steps("wandb"), run.steps("swanlab")) == ([1], [], [1, 2, 3, 4])
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and all(line.startswith("warning: the tracker ") for line in warnings)
    assert "ConnectionError: no route to the server)" in warnings[0] and "OSError: disk gone" in warnings[1]


def test_only_numbers_are_sent_and_nan_only_where_it_is_taken(tmp_path):
    run = Scripted(tmp_path, "mlflow", "swanlab", "console")
    run.log(1, a=1, b=float("nan"), c="words")
    assert set(run.sent["mlflow"][0][1]) == {"a", "b"} and set(run.sent["swanlab"][0][1]) == {"a"}
    assert set(run.sent["console"][0][1]) == {"a", "b", "c"}


def test_a_resumed_run_continues_its_own_and_doubles_no_step(tmp_path, monkeypatch):
    import os

    run = Scripted(tmp_path, "mlflow", "console")
    for step in (1, 2, 3, 4):
        run.log(step, a=step)
    saved = run.trackers.state()
    assert saved["step"] == 4
    again = Scripted(tmp_path, "mlflow", "console")
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "mlflow": _going_on(saved["runs"]["mlflow"])})
    again.trackers.go_on({**saved, "step": 2})
    for step in (2, 3, 4, 5):  # verl validates again after step 2
        again.log(step, a=step)
    assert os.environ["FAKE_RUN"] == saved["runs"]["mlflow"] and again.steps("mlflow") == [5]
    assert again.steps("console") == [2, 3, 4, 5] and again.trackers.state() == {**saved, "step": 5}
    assert json.loads((tmp_path / RECORD).read_text())["mlflow"] == {"run": saved["runs"]["mlflow"], "step": 5}
    elsewhere = Scripted(tmp_path / "absent", "mlflow")
    elsewhere.trackers.go_on({**saved, "step": 2})
    for step in (2, 3):
        elsewhere.log(step, a=step)
    assert elsewhere.steps("mlflow") == [3]  # without the record, only steps after the checkpoint


def _going_on(run):
    return backends.Backend(resuming=lambda each: {"FAKE_RUN": each}, run_id=lambda: run)


def test_a_checkpoint_of_other_trackers_begins_new_runs(tmp_path):
    run = Scripted(tmp_path, "wandb")
    run.trackers.go_on({"step": 2, "runs": {"mlflow": "7"}})
    run.log(3, a=1)
    assert run.steps("wandb") == [3] and run.trackers.state() == {"step": 3, "runs": {"wandb": "0"}}


@pytest.mark.parametrize("ending", ["finished", "failed", "killed"])
def test_runs_end_as_the_training_ends_and_once(tmp_path, clients, ending):
    run = Scripted(tmp_path, "mlflow", "wandb")
    run.log(1, a=1)
    run.trackers.close(ending)
    run.trackers.close("finished")
    run.log(2, a=1)
    assert clients == [ending, ending] and run.steps("mlflow") == [1]


def test_the_configuration_reaches_no_tracker_with_a_secret(tmp_path):
    run = Scripted(tmp_path, "wandb", config={"api_key": "secret-key", "lr": 1})
    run.log(1, a=1)
    assert run.configs == {"wandb": {"api_key": "***", "lr": 1}}


def test_names_are_what_mlflow_takes():
    assert MLFLOW.name("val/acc@1(数 a):b") == "val/acc@1_数 a_:b"


class _Client:
    """A stand-in for MLflow's client, with the status of each run."""

    runs = {"7": "RUNNING", "8": "FINISHED"}

    def __init__(self) -> None:
        self.asked = os.environ["MLFLOW_TRACKING_URI"]

    def get_run(self, run):
        return SimpleNamespace(info=SimpleNamespace(status=self.runs[run]))

    def set_terminated(self, run, status):
        self.runs[run] = (status, self.asked)


@pytest.mark.parametrize("server", ["http://tracking.example", None])
def test_a_run_that_was_left_is_ended_where_it_was_kept_and_no_other(tmp_path, monkeypatch, server):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=_Client))
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "mlflow": MLFLOW})
    monkeypatch.setattr(_Client, "runs", dict(_Client.runs))
    for name in MLFLOW.defaults(tmp_path):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server or "")
    end_left_run(tmp_path, "killed")  # there is no run yet
    for run in ("7", "8"):
        (tmp_path / RECORD).write_text(json.dumps({"mlflow": {"run": run, "step": 3}}))
        end_left_run(tmp_path, "killed")
    kept_at = server or MLFLOW.defaults(tmp_path)["MLFLOW_TRACKING_URI"]
    assert _Client.runs == {"7": (backends.MLFLOW_STATUS["killed"], kept_at), "8": "FINISHED"}
