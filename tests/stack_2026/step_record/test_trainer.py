"""A record that cannot be written costs the run nothing, and is made with the weights that the run began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from verl_plugin.step_record import trainer
from verl_plugin.step_record.folder import RecordedStep
from verl_plugin.step_record.trainer import RecordsSteps


def record(**keys: str) -> RecordedStep:
    config = {"trainer": {"resume_mode": "disable", **keys}}
    return RecordedStep(21, [], {}, {}, {}, config, 1)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: File too large"), TypeError("no")]
)
def test_run_goes_on_without_a_record(tmp_path, monkeypatch, capsys, error):
    def write(*_: Any) -> None:
        raise error

    (tmp_path / "global_step_20").mkdir()
    monkeypatch.setattr(trainer, "write_record", write)
    RecordsSteps()._write(record(), tmp_path, 1)
    assert f"warning: step 21 is not recorded: {error}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "expected"), [("resume_path", "other/global_step_20"), ("disable", "own/global_step_20")]
)
def test_weights_are_those_that_the_run_continued(tmp_path, monkeypatch, mode, expected):
    """A run that resumes another one's step may have a folder of its own for that step, from an earlier run."""
    for run in ("own", "other"):
        (tmp_path / run / "global_step_20").mkdir(parents=True)
    linked: list[Path] = []
    monkeypatch.setattr(trainer, "write_record", lambda folder, record, weights, most: linked.append(weights))
    given = record(resume_mode=mode, resume_from_path=str(tmp_path / "other" / "global_step_20"))
    RecordsSteps()._write(given, tmp_path / "own", 1)
    assert linked == [tmp_path / expected / "actor"]
