"""The status file of a start is replaced atomically, and can be read by older and newer readers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from post_training.start_status import VARIABLE, StartStatus, report_status

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The status file of this process and its children."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "start_1.status.json"))
    return tmp_path / "start_1.status.json"


def test_launcher_and_training_share_one_status(file):
    """Launcher, training and launcher write in turn; each keeps the fields that the other wrote."""
    command = [sys.executable, "-m", "post_training.start_status"]
    subprocess.run([*command, "role=worker", "phase=waiting"], cwd=ROOT, check=True)
    assert StartStatus.read(file) == StartStatus("worker", "waiting")
    report_status(phase="ended", exit_reason="not_valid")
    subprocess.run([*command, "exit_code=137"], cwd=ROOT, check=True)
    assert StartStatus.read(file) == StartStatus("worker", "ended", "not_valid", 137)
    assert [each.name for each in file.parent.iterdir()] == [file.name], "nothing unfinished is left"


@pytest.mark.parametrize("text", [None, "", '{"role": "wor', "[]", "7", '{"role": ["worker"]}', "\udcff"])
def test_absent_or_torn_status_has_defaults(file, text):
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert StartStatus.read(file) == StartStatus()


def test_reader_of_another_release_takes_what_it_knows(file):
    """A newer writer adds fields and values; an older one lacks some."""
    newer = {"role": "worker", "phase": "draining", "exit_reason": "cosmic_ray", "exit_code": "137", "nodes": [1, 2]}
    file.write_text(json.dumps(newer))
    assert StartStatus.read(file) == StartStatus("worker")
    file.write_text('{"exit_reason": "hang"}')
    assert StartStatus.read(file) == StartStatus(exit_reason="hang")
    report_status(phase="ended")
    assert json.loads(file.read_text()) == {
        "role": "head", "phase": "ended", "exit_reason": "hang", "exit_code": None
    }  # fmt: skip


def test_status_nobody_asked_for_is_not_written(file, monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE)
    report_status(phase="ended")
    assert not file.exists() and capsys.readouterr().err == ""
    monkeypatch.setenv(VARIABLE, str(file / "below a folder that is not there"))
    report_status(phase="ended")
    assert "warning: POST_TRAINING_STATUS=" in capsys.readouterr().err
