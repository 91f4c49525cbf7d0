"""How each tracker's client learns that a run has ended, and the values that it is sent."""

import math
import os
import sys
from types import SimpleNamespace

import pytest

from verl_patches.features.tracking.backends import BACKENDS, backend, set_variables

ENDINGS = ("finished", "failed", "killed")
TOLD = {
    "mlflow": [("FINISHED",), ("FAILED",), ("KILLED",)],
    "wandb": [{"exit_code": 0}, {"exit_code": 1}, {"exit_code": 1}],
    "swanlab": [
        {"state": "success", "error": None},
        {"state": "crashed", "error": "the run failed"},
        {"state": "aborted", "error": "the run killed"},
    ],
    "tensorboard": [{}, {}, {}],
}


@pytest.mark.parametrize("name", TOLD)
def test_tracker_is_told_how_the_run_ended(monkeypatch, name):
    told = []
    client = SimpleNamespace(finish=lambda **options: told.append(options), end_run=lambda *status: told.append(status))
    monkeypatch.setitem(sys.modules, "mlflow", client)
    for ending in ENDINGS:
        BACKENDS[name].end(client, ending)
    assert told == TOLD[name]


def test_events_behind_the_checkpoint_are_taken_back():
    """If a run resumes after step 7, the events from step 8 on are purged, since they are logged again."""
    done = []
    writer = SimpleNamespace(close=lambda: done.append("closed"), purge_step=None)
    BACKENDS["tensorboard"].purge(SimpleNamespace(writer=writer), 7)
    assert (done, writer.purge_step) == (["closed"], 8)


def test_values_are_numbers_that_the_tracker_takes():
    metrics = {"loss": 1, "val/acc@1": 0.5, "text": "a", "nan": math.nan, "inf": math.inf, "none": None}
    plain = {"loss": 1, "val/acc@1": 0.5}
    assert BACKENDS["swanlab"].values(metrics) == plain
    found = BACKENDS["wandb"].values(metrics)
    assert {name: value for name, value in found.items() if value == value} == plain | {"inf": math.inf}
    assert math.isnan(found["nan"]) and set(found) == {"loss", "val/acc@1", "nan", "inf"}
    assert BACKENDS["mlflow"].values({"val/acc@1 (\u6570)": 0.5}) == {"val/acc@1 _\u6570_": 0.5}


def test_unknown_tracker_is_left_to_verl():
    assert backend("tracking") is BACKENDS["wandb"] and backend("clearml").purge is None
    assert backend("clearml").values({"a": 1, "b": "x"}) == {"a": 1}


def test_variables_of_the_user_stand_where_they_are_defaults(monkeypatch):
    monkeypatch.setenv("WANDB_DIR", "/mine")
    monkeypatch.setenv("WANDB_MODE", "")
    set_variables({"WANDB_DIR": "/run", "WANDB_MODE": "offline"}, only_absent=True)
    assert (os.environ["WANDB_DIR"], os.environ["WANDB_MODE"]) == ("/mine", "offline")
    set_variables({"WANDB_DIR": "/run"}, only_absent=False)
    assert os.environ["WANDB_DIR"] == "/run"
