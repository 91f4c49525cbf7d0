"""Compiled kernels survive MindSpeed's attempt to remove them all, and only locks that nobody holds are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from verl_patches.features.mindspeed.kernel_cache import kept_kernels, remove_abandoned_locks

HOLDS = "import sys; held = open(sys.argv[1], 'x'); print(flush=True); sys.stdin.read()"


@pytest.fixture
def kernels(tmp_path, monkeypatch) -> Path:
    """Return torch's kernel folder, with one compiled kernel in it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "matmul").mkdir()
    (tmp_path / "matmul" / "matmul.so").touch()
    return tmp_path


def left_by_a_dead_process(folder: Path, seconds_ago: float) -> Path:
    (folder / "lock").touch()
    moment = time.time() - seconds_ago
    os.utime(folder / "lock", (moment, moment))
    return folder / "lock"


def test_orphaned_lock_removed_and_reported(kernels, caplog):
    lock = left_by_a_dead_process(kernels / "matmul", seconds_ago=3600)
    assert remove_abandoned_locks(kernels) == [lock]
    assert str(lock) in caplog.text
    assert [path.name for path in (kernels / "matmul").iterdir()] == ["matmul.so"]


def test_lock_of_another_process_stays(kernels):
    lock = kernels / "matmul" / "lock"
    command = [sys.executable, "-c", HOLDS, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        os.utime(lock, (0, 0))
        assert remove_abandoned_locks(kernels) == [] and lock.exists()
        holder.stdin.close()
    assert remove_abandoned_locks(kernels) == [lock], "control: its process has ended"


def test_a_lock_of_this_moment_stays(kernels):
    """It may have been created but not opened yet."""
    left_by_a_dead_process(kernels / "matmul", seconds_ago=0)
    assert remove_abandoned_locks(kernels) == []


def test_torch_makes_its_lock_where_it_is_looked_for(kernels):
    """The lock's path is read from torch itself, at the moment when a process loads a kernel."""
    seen = []

    class Baton(cpp_extension.FileBaton):
        def try_acquire(self):
            seen.append(Path(self.lock_file_path))
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cpp_extension, "FileBaton", Baton)
        (kernels / "source.cpp").touch()
        cpp_extension.load("matmul", [str(kernels / "source.cpp")])
    assert seen == [kernels / "matmul" / "lock"]


def test_who_asks_for_the_folder_of_all_kernels_finds_none(kernels):
    """MindSpeed asks for this folder and then removes it."""
    with kept_kernels():
        assert not Path(cpp_extension._get_build_directory("", True)).exists()
        assert Path(cpp_extension._get_build_directory("matmul", True)) == kernels / "matmul"
    assert Path(cpp_extension._get_build_directory("", True)).samefile(kernels), "control: it is there"


def test_without_a_folder_there_is_nothing_to_do(tmp_path):
    assert remove_abandoned_locks(tmp_path / "none") == []
