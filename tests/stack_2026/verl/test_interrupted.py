"""A rehearsal that is interrupted leaves the summary of the steps that it has made."""

import json
import signal
import time
from types import SimpleNamespace

import pytest

from post_training.processes.command import Interrupted
from rehearsal import stages as shared
from rehearsal.display import make_console
from rehearsal.stack_2026 import stages
from rehearsal.stack_2026.plan import Options, make_plan


@pytest.mark.parametrize("steps", [0, 3])
def test_interrupted_training_leaves_summary(tmp_path, monkeypatch, steps):
    plan = make_plan(Options(output=tmp_path / "run"), "now")

    def train(*_):
        metrics = {"critic/score/mean": 0.5}
        lines = (json.dumps({"step": step, "data": metrics}) for step in range(1, steps + 1))
        plan.upstream_metrics.write_text("".join(f"{line}\n" for line in lines))
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(shared, "run_to_the_end", lambda *_: 0)
    monkeypatch.setattr(stages, "run_to_the_end", train)
    monkeypatch.setattr(stages, "count_parameters", lambda model: 1)
    with pytest.raises(Interrupted):
        stages.Rehearsal(make_console(), SimpleNamespace(received=[]), time.time()).carry_out(plan)
    summary = json.loads((plan.output / "summary.json").read_text())
    assert summary["failure"] == "interrupted by SIGINT" and summary["steps"] == steps


def test_interrupted_preparation_leaves_summary(tmp_path, monkeypatch):
    plan = make_plan(Options(output=tmp_path / "run"), "now")

    def prepare(*_):
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(shared, "run_to_the_end", prepare)
    with pytest.raises(Interrupted):
        stages.Rehearsal(make_console(), SimpleNamespace(received=[]), time.time()).carry_out(plan)
    assert json.loads((plan.output / "summary.json").read_text())["failure"] == "interrupted by SIGTERM"
