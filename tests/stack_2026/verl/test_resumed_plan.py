"""A run that started from another run's checkpoint resumes from its own."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from post_training.checkpoint.complete_files import write_complete
from post_training.processes.command import SignalFlag
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.preflight import PreflightError
from rehearsal.stack_2026.plan import Options, make_plan
from rehearsal.stack_2026.stages import Rehearsal

FROM = "trainer.resume_from_path"


def step(checkpoints: Path, number: int) -> Path:
    folder = checkpoints / f"global_step_{number}"
    folder.mkdir(parents=True)
    (folder / "data.pt").write_bytes(bytes(3))
    write_complete(folder)
    return folder


@pytest.fixture
def other(tmp_path) -> Path:
    """Checkpoint of another run."""
    return step(tmp_path / "other" / "checkpoints", 1)


@pytest.fixture
def run(tmp_path, other) -> Path:
    """The folder of a run that started from `other` and has trained steps 2 and 3."""
    folder = tmp_path / "run"
    folder.mkdir()
    begun = Options(output=folder, overrides=("trainer.resume_mode=resume_path", f"+{FROM}='{other}'", "data.seed=7"))
    begun.write(folder / OPTIONS_NAME)
    lines = [json.dumps({"step": number, "time": 1.0, "metrics": {}}) for number in (2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def words_of(run: Path, *more: str) -> list[str]:
    """Resume with more overrides, and return the resume mode and path that the training gets."""
    plan = make_plan(Options.of_run(run, more), "now")
    rehearsal = Rehearsal(Console(file=io.StringIO()), SignalFlag(), 0.0)
    command = rehearsal._resumed(plan).run_command()
    last = {word.lstrip("+").partition("=")[0]: word.partition("=")[2].strip("'\"") for word in command}
    assert last["data.seed"] == "7"
    return [last["trainer.resume_mode"], last.get(FROM, "")]


def test_run_without_a_checkpoint_of_its_own_begins_again(run, other):
    assert words_of(run) == ["resume_path", str(other)]


def test_own_checkpoint_preferred_to_another_runs(run):
    own = [step(run / "checkpoints", number) for number in (2, 3)]
    assert words_of(run) == ["resume_path", str(own[1])]
    (own[1] / "data.pt").unlink()
    assert words_of(run) == ["resume_path", str(own[0])]


def test_checkpoint_that_is_named_now_comes_first(run, other):
    own = [step(run / "checkpoints", number) for number in (2, 3)]
    for named in (own[0], other):
        assert words_of(run, f"{FROM}={named}") == ["resume_path", str(named)]
    with pytest.raises(PreflightError, match="global_step_9"):
        words_of(run, f"{FROM}={run / 'checkpoints' / 'global_step_9'}")


def test_lost_checkpoint_of_the_other_run_is_not_needed(run, other):
    own = step(run / "checkpoints", 3)
    (other / "data.pt").unlink()
    assert words_of(run) == ["resume_path", str(own)]
