"""Exclusive ownership of a folder: live, killed and released owners, other machines, and concurrent starts."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from post_training import run_lock
from post_training.run_lock import STALE_S, FolderInUse, FolderLock, LivingOwners, owning

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from post_training.run_lock import owning
with owning([Path(sys.argv[1])], "run"):
    print("owned", flush=True)
    sys.stdin.read()
"""


class Clock:
    """Clock that advances only when something waits; `during` is called at every wait."""

    def __init__(self, during=lambda: None):
        self.now, self._during = 0.0, during

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        self._during()


def never(_):
    raise AssertionError("nobody has to wait for an owner of this machine")


@pytest.fixture
def holder(tmp_path):
    """Process that owns the folder until its input is closed."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **streams) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.stdin.close()


def elsewhere(folder, beats=7):
    """Write the file of an owner on another machine; return a function that sets its heartbeat counter."""
    file = folder / ".run.owner.1"
    facts = {"host": "a3-07", "pid": 4123, "started": "81", "machine": "another", "began": "2026-11-26 09:12:44"}

    def write(number):
        file.write_text(f"{json.dumps(facts)}\n{number:020d}\n")

    write(beats)
    return write


def test_living_owner_rejects_a_second_start(tmp_path, holder):
    with pytest.raises(FolderInUse, match=rf"{tmp_path} is in use by process {holder.pid} on {os.uname().nodename}"):
        FolderLock(tmp_path, "run", wait=never).acquire()
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path, "run", wait=never).check_free()
    FolderLock(tmp_path, "rehearsal", wait=never).acquire()


def test_killed_owner_makes_way_at_once(tmp_path, holder):
    holder.kill()
    holder.wait()
    FolderLock(tmp_path, "run", wait=never).check_free()
    FolderLock(tmp_path, "run", wait=never).acquire()


def test_killed_owner_that_nobody_reaped_makes_way(tmp_path, holder):
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it has exited, and stays a zombie
    FolderLock(tmp_path, "run", wait=never).acquire()


def test_reused_process_number_is_no_owner(tmp_path):
    lock = FolderLock(tmp_path, "run")
    lock.acquire()
    file = tmp_path / ".run.owner.1"
    facts, state = file.read_text().splitlines()
    file.write_text(f"{json.dumps(json.loads(facts) | {'started': '1'})}\n{state}\n")
    FolderLock(tmp_path, "run", wait=never).acquire()


def test_released_folder_is_taken_at_once(tmp_path):
    for _ in range(4):
        with owning([tmp_path], "run"):
            pass
    assert sorted(each.name for each in tmp_path.iterdir()) == [".run.owner.3", ".run.owner.4"]


def test_requeued_job_beside_a_living_one_rejected(tmp_path, capsys):
    """A scheduler requeues a job to another node while the old one, cut off from it, still writes to the folder."""
    beat = elsewhere(tmp_path)
    clock = Clock()
    clock._during = lambda: beat(8) if clock.now >= 9 else None
    with pytest.raises(FolderInUse, match="is in use by process 4123 on a3-07, since 2026-11-26 09:12:44"):
        FolderLock(tmp_path, "run", clock.wait, clock).acquire()
    assert clock.now < STALE_S and "waiting up to 90 s" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == [".run.owner.1"]


def test_stale_owner_elsewhere_taken_over_after_time(tmp_path):
    elsewhere(tmp_path)
    clock = Clock()
    lock = FolderLock(tmp_path, "run", clock.wait, clock)
    lock.acquire()
    assert STALE_S <= clock.now <= STALE_S + 1 and lock.beat()


def test_old_owner_that_wakes_up_has_lost(tmp_path, monkeypatch, capsys):
    """An owner that was suspended for too long notices at its next heartbeat, and leaves the new owner's file alone."""
    old, clock = FolderLock(tmp_path, "run"), Clock()
    old.acquire()
    monkeypatch.setattr(run_lock, "_machine", lambda: "that of the new owner")
    new = FolderLock(tmp_path, "run", clock.wait, clock)
    new.acquire()
    before = (tmp_path / ".run.owner.2").read_bytes()
    assert not old.beat() and new.beat()
    assert (tmp_path / ".run.owner.2").read_bytes() != before

    ended, owned = [], run_lock.Ownership()
    monkeypatch.setattr(run_lock.os, "kill", lambda process, number: ended.append((process, number)))
    monkeypatch.setattr(run_lock, "BEAT_S", 0)
    run_lock._beat([old], threading.Event(), owned)
    assert "took over" in owned.lost and ended == [(os.getpid(), 15)] and owned.lost in capsys.readouterr().err


@pytest.mark.parametrize("links", [True, False])
def test_one_of_many_starts_wins(tmp_path, monkeypatch, links):
    """All of them see the same stale owner and try to take over at the same moment."""
    elsewhere(tmp_path)
    if not links:

        def reject(*_):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(run_lock.os, "link", reject)
    together, outcomes = threading.Barrier(8), []

    def start():
        clock = Clock()
        clock._during = lambda: together.wait() if clock.now == STALE_S else None
        try:
            FolderLock(tmp_path, "run", clock.wait, clock).acquire()
        except FolderInUse:
            outcomes.append("rejected")
        else:
            outcomes.append("owner")

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["owner"] + ["rejected"] * 7
    assert not list(tmp_path.glob("*.new"))


def test_damaged_owner_file_is_waited_for(tmp_path):
    (tmp_path / ".run.owner.1").write_bytes(b"\xff{")
    clock = Clock()
    FolderLock(tmp_path, "run", clock.wait, clock).acquire()
    assert clock.now >= STALE_S


def test_folders_are_given_back_where_one_is_in_use(tmp_path, holder):
    """A run owns its output and checkpoint folders; if the second is taken, the first is released."""
    other = tmp_path.parent / f"{tmp_path.name}.other"
    with pytest.raises(FolderInUse), owning([other, tmp_path], "run"):
        pass
    FolderLock(other, "run", wait=never).acquire()


def test_living_owners_counted_by_role(tmp_path, holder):
    """Roles with another prefix and released or killed owners do not count; a later owner of the role does."""
    look = LivingOwners(tmp_path, "ru").look
    assert look() == {"run"} and LivingOwners(tmp_path, "supervise-").look() == set()
    with owning([tmp_path], "run-other"):
        assert look() == {"run", "run-other"}
    assert look() == {"run"}
    holder.kill()
    holder.wait()
    assert look() == set()
    with owning([tmp_path], "run"):
        assert look() == {"run"}


def test_owner_elsewhere_lives_while_its_counter_rises(tmp_path):
    """A dead node's file looks like that of a live one until its counter stops rising."""
    beat, clock = elsewhere(tmp_path), Clock()
    look = LivingOwners(tmp_path, "run", clock).look
    assert look() == set()
    clock.wait(60)
    assert look() == set(), "left by a node that is dead"
    beat(8)
    assert look() == {"run"}
    clock.wait(STALE_S)
    assert look() == {"run"}
    clock.wait(1)
    assert look() == set()
    beat(9)
    assert look() == {"run"}, "it has only been cut off for a while"
