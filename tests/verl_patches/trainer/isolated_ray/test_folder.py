"""A run's private folder is closed to others, removed at the end, and after a kill removed by the next run."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl_patches.trainer.isolated_ray import FolderError, private_folder
from verl_patches.trainer.isolated_ray.folder import shared_memory_prefix

ROOT = Path(__file__).resolve().parents[4]
# Creates nested folders with content and shared memory, like a rehearsal and its training, and waits to be ended.
HOLDER = """
import sys, tempfile
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from verl_patches.trainer.isolated_ray import name_shared_memory, private_folder
with private_folder("outer", sys.argv[1]) as outer, private_folder("run", outer) as folder:
    tempfile.tempdir = str(folder)
    name_shared_memory()
    memory = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(memory._name, "shared_memory")  # as where the tracker is killed too
    (folder / "r").mkdir(mode=0o777)
    (folder / "r" / "log").write_text("x")
    print(outer, memory.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def base():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def holder(base):
    line = [sys.executable, "-c", HOLDER, base]
    with subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_it_is_closed_to_others_and_gone_at_the_end_with_its_shared_memory(base):
    removed = []
    with private_folder("run", base, removed.append) as folder:
        assert folder.parent == base and folder.stat().st_mode & 0o777 == 0o700
        (folder / "deep" / "er").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
        memory = Path("/dev/shm") / f"{shared_memory_prefix(folder)}1"
        memory.touch()
    assert not folder.exists() and not memory.exists() and removed == [folder.name]


def test_names_are_not_to_be_foreseen(base):
    with private_folder("run", base) as first, private_folder("run", base) as second:
        assert first != second and str(os.getpid()) not in first.name


def test_the_next_run_removes_what_a_killed_one_left(base, holder):
    outer, memory = holder.stdout.readline().split()
    assert Path(outer).exists() and (Path("/dev/shm") / memory).exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    # The control: nothing else removes it.
    assert Path(outer).exists() and (Path("/dev/shm") / memory).exists()
    removed = []
    with private_folder("outer", base, removed.append):
        assert not Path(outer).exists() and not (Path("/dev/shm") / memory).exists()
        assert removed == [Path(outer).name]


def test_a_run_that_lives_keeps_its_folder(base, holder):
    outer, memory = holder.stdout.readline().split()
    with private_folder("outer", base):
        assert Path(outer).exists()
    assert holder.communicate(timeout=600) and holder.returncode == 0
    assert not Path(outer).exists() and not (Path("/dev/shm") / memory).exists()


def test_lookalike_of_a_run_is_left_alone(base):
    (base / "run-abcdefgh").mkdir(mode=0o700)
    elsewhere = base / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (base / "run-linklink").symlink_to(elsewhere)
    (base / "run-otherfil").write_text("kept")
    (base / "run-marked00").mkdir(mode=0o700)
    (base / "run-marked00" / ".run-of-verl-patches").write_text("of somebody")
    with private_folder("run", base):
        pass
    assert len(list(base.iterdir())) == 5 and (base / "run-marked00" / ".run-of-verl-patches").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: only root can give a folder away")
def test_a_folder_of_another_user_is_left_alone(base, holder):
    outer, _ = holder.stdout.readline().split()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    os.chown(outer, 65534, 65534)
    with private_folder("outer", base):
        assert Path(outer).exists()
    os.chown(outer, 0, 0)
    with private_folder("outer", base):
        assert not Path(outer).exists()


def test_a_place_that_takes_no_folder_is_named():
    with pytest.raises(FolderError, match="no private folder can be created in /proc/nowhere"):  # noqa: SIM117
        with private_folder("run", "/proc/nowhere"):
            pass


def test_sockets_below_it_have_paths_that_the_kernel_takes(base, monkeypatch):
    for length in (1, 10, 60, 90):
        place = base / ("x" * length)
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with private_folder("run") as folder:
            deep = folder / "r" / f"session_2026-01-01_00-00-00_000000_{2**22}" / "sockets"
            deep.mkdir(parents=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(deep / "plasma_store"))
            assert folder.parent == (place if length == 1 else Path("/tmp")) or length == 10
