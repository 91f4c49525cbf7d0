"""How a rehearsal exits on either stack: its exit status, and a one-sentence reason."""

import errno
import json
import signal
from pathlib import Path

import pytest

from post_training.data import DataError
from post_training.processes.command import Interrupted
from post_training.report import ReportError
from post_training.run_lock import FolderInUse
from rehearsal import __main__ as rehearsal_2025
from rehearsal.command_line import print_commands, status_of
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.plan import Options as Options2025
from rehearsal.plan import make_plan as make_plan_2025
from rehearsal.preflight import PreflightError
from rehearsal.stack_2026 import __main__ as rehearsal_2026
from rehearsal.stack_2026.plan import Options as Options2026
from rehearsal.stack_2026.plan import make_plan as make_plan_2026
from rehearsal.stages import RunFailed

LOG = Path("logs") / "run.log"
ENDS = [
    (PreflightError("The model does not fit"), 2, "error: The model does not fit\n"),
    (DataError("FILE has no problems"), 2, "error: FILE has no problems\n"),
    (FolderInUse("Another run writes it"), 2, "error: Another run writes it\n"),
    (ReportError("metrics.jsonl:1 is no record"), 1, "error: metrics.jsonl:1 is no record\n"),
    (RunFailed("Step 2 failed", LOG), 1, f"error: Step 2 failed\nWhole log: {LOG}\n"),
    (Interrupted(signal.SIGTERM), 128 + signal.SIGTERM, "ended the run; everything it started has been stopped.\n"),
]


@pytest.mark.parametrize(("error", "status", "words"), ENDS, ids=lambda value: type(value).__name__)
def test_every_end_has_its_status_and_one_sentence(tmp_path, capsys, error, status, words):
    def run() -> None:
        raise error

    assert status_of(run, tmp_path) == status
    assert capsys.readouterr().err.endswith(words)


def test_full_disk_is_one_sentence_and_other_errors_are_raised(tmp_path, capsys):
    def write(number: int) -> None:
        raise OSError(number, "it cannot be written", str(tmp_path / "metrics.jsonl"))

    assert status_of(lambda: write(errno.ENOSPC), tmp_path) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(OSError, match="it cannot be written"):
        status_of(lambda: write(errno.EACCES), tmp_path)


def test_success_is_status_zero_and_says_nothing(tmp_path, capsys):
    assert status_of(lambda: None, tmp_path) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [rehearsal_2025, rehearsal_2026])
def test_relative_paths_are_of_the_users_folder(tmp_path, monkeypatch, command):
    """The checkpoint, the data and the training are made by processes that start in the checkout."""
    monkeypatch.chdir(tmp_path)
    words = ["--data", "problems.jsonl", "--", "actor_rollout_ref.model.path=models/qwen", "trainer.save_freq=2"]
    options, _ = command.parse_arguments(words)
    assert options.data == tmp_path / "problems.jsonl" and options.given_model == tmp_path / "models" / "qwen"
    assert options.overrides[1:] == ("trainer.save_freq=2",)
    (tmp_path / OPTIONS_NAME).write_text(json.dumps({"data": None, "output": None, "overrides": [], "resumes": False}))
    resumed, _ = command.parse_arguments(["--resume", ".", "--", "trainer.default_local_dir=there"])
    assert resumed.overrides == (f"trainer.default_local_dir={tmp_path / 'there'}",)


@pytest.mark.parametrize("stack", ["2025", "2026"])
def test_printed_commands_are_those_of_the_plan(tmp_path, capsys, stack):
    plans = {
        "2025": lambda: make_plan_2025(Options2025(output=tmp_path), "now"),
        "2026": lambda: make_plan_2026(Options2026(output=tmp_path), "now"),
    }
    plan = plans[stack]()
    print_commands(plan, "python-of-the-user")
    printed = capsys.readouterr().out
    assert printed.startswith(f"output\n  {tmp_path}\ncheckpoint\n  {plan.checkpoint}\n")
    assert printed.splitlines()[-1].startswith("  python-of-the-user -m rehearsal.")
    assert "\n  export OMP_NUM_THREADS=1\n" in printed
