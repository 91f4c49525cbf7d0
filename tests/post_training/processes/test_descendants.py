"""Descendant processes: finding them, reaping them, and killing those that do not exit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from post_training.processes.descendants import (
    descendants,
    end_descendants,
    reap_adopted,
    runs,
    send,
    wait_until,
)

ASLEEP = "import signal; print(1, flush=True); signal.pause()"
# Starts a process that starts another and exits, and prints what is left of both.
PROGRAM = """
import os, subprocess, sys, time
sys.path.insert(0, os.getcwd())
from post_training.processes.descendants import adopt_orphans, descendants, end_descendants
adopt_orphans()
asleep = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
kept = subprocess.Popen([sys.executable, "-c", asleep])
start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {asleep!r}])"
subprocess.run([sys.executable, "-c", start])
before = descendants(os.getpid())
left = end_descendants([kept.pid], 0.01, 60)
print(len(before), left, descendants(os.getpid()) == [kept.pid])
kept.kill()
kept.wait()
print(end_descendants([], 60, 0))
"""


@pytest.fixture
def asleep():
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ASLEEP], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_runs_until_it_has_ended_whether_or_not_it_was_collected(asleep):
    assert runs(asleep.pid) and asleep.pid in descendants(os.getpid())
    send(asleep.pid, signal.SIGKILL)
    assert wait_until(lambda: not runs(asleep.pid), 60)
    assert asleep.pid not in descendants(os.getpid()), "it is a zombie"
    reap_adopted(kept=[asleep.pid])
    assert os.path.exists(f"/proc/{asleep.pid}")
    reap_adopted(kept=[int(child) for child in children() if int(child) != asleep.pid])
    assert not os.path.exists(f"/proc/{asleep.pid}") and not runs(asleep.pid)
    send(asleep.pid, signal.SIGKILL)


@pytest.mark.parametrize("gone", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_goes_while_it_is_looked_at_does_not_run(asleep, monkeypatch, gone):
    read = Path.read_text

    def reading(path):
        if str(path) == f"/proc/{asleep.pid}/stat":
            raise gone
        return read(path)

    monkeypatch.setattr(Path, "read_text", reading)
    assert not runs(asleep.pid) and runs(os.getpid()) and asleep.pid not in descendants(os.getpid())


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def test_orphans_are_ended_with_the_others_and_what_is_kept_goes_on():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["2 [] True", "[]"], done.stderr


def test_a_condition_is_waited_for_no_longer_than_the_limit():
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 60) and wait_until(lambda: True, 0)
    assert not wait_until(lambda: False, 0.01)
    # Earlier tests in this process may have left processes that have children.
    assert end_descendants(descendants(os.getpid()), 0, 0) == []
