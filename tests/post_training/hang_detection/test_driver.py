"""The driver reports hung processes and ends the run, and rejects contradictory limits."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from overlay import ConfigurationError
from post_training.hang_detection.driver import Watcher, watching
from post_training.hang_detection.limits import Watch
from post_training.hang_detection.settings import DEVICE_WATCHDOG_S, EndSeconds, WarnSeconds, WatchSettings
from post_training.hang_detection.signs import TRAINER, Sign, process_start
from post_training.report import RunFacts, summarise
from post_training.report.heartbeat import HEARTBEAT, read_progress
from verl_patches.features.measure.run_files import RunFiles, read_faults
from verl_patches.features.settings import OverlaySettings, SettingsError
from verl_patches.features.watch.feature import check_limits
from verl_patches.trainer.main_ppo import compose

SETTINGS = WatchSettings(interval_s=1.0, warn_s=WarnSeconds(silent=10), end_s=EndSeconds(silent=20))


@pytest.fixture
def victim():
    """A stopped process."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1
    ) as run:
        run.stdout.readline()
        os.kill(run.pid, signal.SIGSTOP)
        yield run
        run.kill()


def sign_of(name, pid, serial=0, started=None):
    start = process_start(pid) if started is None else started
    return Sign(name, serial, 0, "update", "at mlp.py:7 in forward", 3, os.uname().nodename, pid, start)


class Driven:
    """A hang detector with a simulated clock, a trainer that makes progress, and rank 0."""

    def __init__(self, folder, pid, started=None):
        self.now, self.ended, self.serial = 0.0, 0, 0
        self.rank = sign_of("0", pid, started=started)
        watch = Watch(SETTINGS, 1, lambda: self.now)
        self.watcher = Watcher(watch, self.received, RunFiles(str(folder)), self.end)

    def received(self):
        self.serial += 1
        trainer = Sign(TRAINER, self.serial, 0, None, "waits in ray.get", 3, "node", 1, 1.0)
        return [trainer.packed(), self.rank.packed()]

    def end(self):
        self.ended += 1

    def look_at(self, *times):
        for self.now in times:
            self.watcher.look()


def test_a_stop_is_said_once_and_then_ends_the_run(tmp_path, capsys, victim):
    driven = Driven(tmp_path, victim.pid)
    driven.look_at(0, 5, 10)
    assert capsys.readouterr().err == "" and read_faults(tmp_path) == []
    driven.look_at(11, 12, 13)
    said = f"rank 0 (process {victim.pid} on {os.uname().nodename}) has not answered for 11 s in update of step 3"
    assert capsys.readouterr().err == f"warning: {said}, last at mlp.py:7 in forward\n"
    assert victim.poll() is None and not driven.ended
    driven.look_at(21, 22)
    assert driven.ended == 1 and driven.watcher.sentence.endswith("; the run was ended")
    assert "has not answered for 21 s in update of step 3" in driven.watcher.sentence
    assert victim.wait(30) == -signal.SIGKILL
    facts = [(fault["rank"], fault["phase"], fault["seconds"], fault["ended"]) for fault in read_faults(tmp_path)]
    summary = summarise([], RunFacts(1, 1, 1.0, "bfloat16"), faults=read_faults(tmp_path))
    stop = {"rank": 0, "phase": "update", "step": 3, "seconds": 21.0, "waiting": [], "ended": True}
    assert summary["not_answering"] == [stop] and summary["reward_errors"] == 0
    assert facts == [(0, "update", 11.0, False), (0, "update", 21.0, True)]


def test_recovered_rank_reported_and_can_hang_again(tmp_path, capsys, victim):
    driven = Driven(tmp_path, victim.pid)
    driven.look_at(0, 11)
    driven.rank = replace(driven.rank, serial=1)
    driven.look_at(12)
    assert "warning: rank 0 continues after 11 s" in capsys.readouterr().err
    driven.look_at(23)
    assert "has not answered for 11 s" in capsys.readouterr().err and not driven.ended


def heartbeat(folder):
    return json.loads((folder / HEARTBEAT).read_text())


def test_the_run_has_a_heartbeat_in_its_folder(tmp_path, victim):
    driven = Driven(tmp_path, victim.pid)
    assert read_progress(tmp_path) is None
    driven.look_at(0)
    first, beat = read_progress(tmp_path), heartbeat(tmp_path)
    assert first == 2 and (beat["process"], beat["phase"], beat["step"]) == ("0", "update", 3) and beat["time"] > 1e9
    (tmp_path / HEARTBEAT).unlink()
    driven.rank = replace(driven.rank, serial=5)
    driven.look_at(1, 2)
    assert read_progress(tmp_path) is None, "written although nobody has made progress"
    driven.rank = replace(driven.rank, serial=6, moves=1)
    driven.look_at(3)
    assert read_progress(tmp_path) == first + 1


def test_hangs_are_seen_where_no_heartbeat_can_be_written(tmp_path, victim, capsys, monkeypatch):
    driven = Driven(tmp_path, victim.pid)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(RunFiles, "heartbeat", mock.Mock(side_effect=full))
    driven.look_at(0, 11)
    said = capsys.readouterr().err
    assert said.startswith("warning: the run's heartbeat cannot be written (No space left on device)\n")
    assert "has not answered for 11 s" in said


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"progress": "7"}', '{"progress": null}'])
def test_a_damaged_heartbeat_is_none(tmp_path, content):
    (tmp_path / HEARTBEAT).write_text(content)
    assert read_progress(tmp_path) is None


class Store:
    """A stand-in for Ray's store whose first read fails."""

    def __init__(self):
        self.read, self.cleared, self.again = 0, 0, threading.Event()

    def received(self):
        self.read += 1
        if self.read == 1:
            raise ConnectionError("the store is away")
        self.again.set()
        return []

    def clear(self):
        self.cleared += 1
        raise ConnectionError("the store is gone")


@pytest.mark.parametrize("isolated_ray", [False, True])
def test_unavailable_store_reported_and_read_again(tmp_path, capsys, monkeypatch, isolated_ray):
    store = Store()
    monkeypatch.setattr("post_training.hang_detection.ray_store.RayStore", lambda: store)
    with watching(replace(SETTINGS, interval_s=0.001), 1, RunFiles(str(tmp_path)), isolated_ray):
        assert store.again.wait(30)
    assert capsys.readouterr().err == "warning: heartbeats cannot be read (the store is away)\n"
    assert store.cleared == (0 if isolated_ray else 1)


def test_a_run_that_is_not_watched_reads_nothing(tmp_path, monkeypatch):
    store = Store()
    monkeypatch.setattr("post_training.hang_detection.ray_store.RayStore", lambda: store)
    with watching(replace(SETTINGS, enabled=False, interval_s=0.001), 1, RunFiles(str(tmp_path)), False):
        assert not [thread for thread in threading.enumerate() if thread.name == "watch"]
    assert (store.read, store.cleared) == (0, 0)


@pytest.mark.parametrize(("started", "killed"), [(None, True), (1.0, False)])
def test_a_process_that_only_has_its_number_is_left_alone(tmp_path, victim, monkeypatch, started, killed):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    driven = Driven(tmp_path, victim.pid, started)
    driven.look_at(0, 21)
    monkeypatch.undo()
    assert driven.ended == 1 and sent == [victim.pid] * killed


def test_a_process_that_has_ended_by_itself_ends_the_run_too(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    driven = Driven(tmp_path, process.pid, started=1.0)
    driven.look_at(0, 21)
    assert driven.ended == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"warn_s": WarnSeconds(update=2000)}, "warn_s.update=2000 is not below .*end_s.update=1500"),
        ({"warn_s": WarnSeconds(ref=float("nan"))}, "warn_s.ref=nan is not below .*end_s.ref=1500"),
        ({"end_s": EndSeconds(ref=float("nan"))}, "warn_s.ref=600 is not below .*end_s.ref=nan"),
        ({"interval_s": float("nan")}, "less than 3 heartbeats, which come every .*interval_s=nan"),
        ({"interval_s": 30.0}, "warn_s.silent=60 is less than 3 heartbeats, which come every .*interval_s=30"),
    ],
)
def test_limits_that_contradict_each_other_rejected(changes, says):
    with pytest.raises(ConfigurationError, match=says):
        check_limits({}, SimpleNamespace(watch=WatchSettings(**changes)))


@pytest.mark.parametrize("name", ["rehearsal", "deepseek_v3_256die_random_init", "deepseek_v3_256die_true_weight"])
def test_the_configurations_end_where_dies_wait_before_the_device_does(name):
    chosen = OverlaySettings.from_config(compose(name, []).actor_rollout_ref).watch
    check_limits({}, SimpleNamespace(watch=chosen))
    for phase in ("silent", "reshard", "rollout", "old_log_prob", "ref", "update"):
        assert getattr(chosen.end_s, phase) < DEVICE_WATCHDOG_S
    if name != "rehearsal":
        assert chosen == WatchSettings(), "the configuration shows the defaults"


def test_a_limit_of_an_unknown_phase_rejected():
    with pytest.raises(SettingsError, match="unknown key actor_rollout_ref.overlay.watch.warn_s.updaet"):
        OverlaySettings.from_config({"overlay": {"watch": {"warn_s": {"updaet": 1}}}})
