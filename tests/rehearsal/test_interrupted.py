"""Ctrl-C in a rehearsal is acknowledged immediately and leaves a summary."""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from post_training.processes.command import Interrupted, SignalFlag
from post_training.report import ReportError
from rehearsal import stages
from rehearsal.display import make_console
from rehearsal.plan import Options, make_plan

CONFIG = {"trainer": {"total_training_steps": 5}, "actor_rollout_ref": {"overlay": {"precision": "bfloat16"}}}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_acknowledged_when_it_comes(capfd, number):
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    with SignalFlag() as signals:
        os.kill(os.getpid(), number)
        first = capfd.readouterr().err
        os.kill(os.getpid(), number)
    signal.signal(number, before)
    name = signal.Signals(number).name
    assert signals.received == [number, number]
    assert first == f"\n{name}: stopping all processes; send it again to stop waiting\n"
    assert capfd.readouterr().err == f"\n{name} again: no longer waiting\n"


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Function that interrupts a rehearsal's first command after `steps` steps, and returns the plan."""

    def run(steps):
        plan = make_plan(Options(output=tmp_path / "run"), "now")

        def command(*_):
            lines = (
                json.dumps({"step": step, "time": 1.0, "metrics": {"critic/score/mean": 0.5}})
                for step in range(1, steps + 1)
            )
            (plan.output / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
            raise Interrupted(signal.SIGINT)

        monkeypatch.setattr(stages, "run_to_the_end", command)
        monkeypatch.setattr(stages, "check_before_anything", lambda plan: CONFIG)
        rehearsal = stages.Rehearsal(Console(), SimpleNamespace(received=[]), time.time())
        with pytest.raises(Interrupted):
            rehearsal.carry_out(plan)
        return plan

    return run


@pytest.mark.parametrize("steps", [0, 3])
def test_interrupted_rehearsal_leaves_summary(interrupted, steps):
    plan = interrupted(steps)
    summary = json.loads((plan.output / "summary.json").read_text())
    assert summary["failure"] == "interrupted by SIGINT" and summary["steps"] == steps
    assert (plan.output / "report.png").exists() == bool(steps)


def test_brackets_in_logs_and_paths_are_no_markup(tmp_path, monkeypatch, capsys):
    plan = make_plan(Options(output=tmp_path / "[run]"), "now")
    log = plan.output / "logs" / "prepare.log"

    def command(line, environment, folder, log, signals, show):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("<s>[INST] 1+1 [/INST]\n")
        show()
        return 0

    monkeypatch.setattr(stages, "run_to_the_end", command)
    rehearsal = stages.Rehearsal(make_console(), SimpleNamespace(received=[]), time.time())
    rehearsal._prepare_step(f"Reading {log}", ["true"], plan)
    assert f"Reading {log}" in capsys.readouterr().out


def test_summary_that_cannot_be_written_keeps_the_interrupt(interrupted, monkeypatch, capsys):
    def reject(*_):
        raise ReportError("metrics.jsonl, line 1 is damaged.")

    monkeypatch.setattr(stages, "write_report", reject)
    interrupted(0)
    said = " ".join(capsys.readouterr().out.split())
    assert "has no summary: metrics.jsonl, line 1 is damaged." in said
