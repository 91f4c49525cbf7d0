"""One of several processes makes a folder while the others wait, and a killed process blocks none."""

import fcntl
import subprocess
import sys

import pytest

from rehearsal.made_once import one_at_a_time
from rehearsal.plan import ROOT

# Says how often it waited, and whether it made the folder or found it.
PROGRAM = """
import sys
from pathlib import Path
from rehearsal.made_once import one_at_a_time
output = Path(sys.argv[1])
def wait(): print("waits", flush=True)
with one_at_a_time(output, wait):
    print("found" if output.exists() else "made", flush=True)
    output.mkdir(exist_ok=True)
"""


def test_waiting_processes_make_one_folder_between_them(tmp_path):
    output, lock = tmp_path / "tiny", tmp_path / ".tiny.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        started = [subprocess.Popen([sys.executable, "-c", PROGRAM, output], **pipes) for _ in range(3)]
        assert [process.stdout.readline() for process in started] == ["waits\n"] * 3
    said = [process.communicate(timeout=300)[0].split()[-1] for process in started]
    assert sorted(said) == ["found", "found", "made"]
    assert list(tmp_path.iterdir()) == [output]


def test_lock_that_a_killed_process_left_is_taken(tmp_path):
    (tmp_path / ".tiny.lock").touch()
    with one_at_a_time(tmp_path / "tiny", lambda: pytest.fail("nobody holds the lock")):
        assert (tmp_path / ".tiny.lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_not_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with one_at_a_time(tmp_path / "tiny", lambda: None):
        assert list(tmp_path.iterdir()) == []
