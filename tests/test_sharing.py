"""If several processes share the tests, each file, and each folder that must stay together, runs in one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests.sharing import FileScheduling

def pytest_xdist_make_scheduler(config, log):
    scheduler = FileScheduling(config, log)
    scheduler.together = {together}
    return scheduler
"""
# Each test records the process that ran it. Both processes get a unit of tests before either begins.
TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("name", ["a", "b::c", "d@e", "f"])
def test_who(name):
    said = pathlib.Path(os.environ["SAID"])
    with open(said / str(os.getpid()), "a") as file:
        file.write(__file__ + "\\n")
"""
# A process that crashes in its first test leaves that test and another file's; the other process's test ends later.
CRASHING = {
    "test_0.py": """
import os, pathlib
crashed = pathlib.Path(os.environ["SAID"]) / "crashed"

def test_crash():
    if not crashed.exists():
        crashed.touch()
        os.kill(os.getpid(), 9)
""",
    "test_1.py": """
import os, pathlib, time
crashed = pathlib.Path(os.environ["SAID"]) / "crashed"

def test_wait():
    while not crashed.exists():
        time.sleep(0.01)
""",
    "test_2.py": """
import os, pathlib

def test_left():
    (pathlib.Path(os.environ["SAID"]) / "left").touch()
""",
}
FOLDERS = ("worker_processes", "worker_processes", "other", "other")


def shared(folder: Path, conftest: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder in two processes, which record their work in the folder "said"."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "said").mkdir()
    (folder / "conftest.py").write_text(conftest)
    command = [sys.executable, "-m", "pytest", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SAID": str(folder / "said")}
    command += ["--import-mode=importlib", "--timeout=600", "tests"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def runs(tmp_path):
    """A function runs(conftest) that returns, for each file, the processes that ran its tests."""
    for number, folder in enumerate(FOLDERS):
        (tmp_path / "tests" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / folder / f"test_{number}.py").write_text(TESTS)

    def run(conftest: str) -> dict[str, set[str]]:
        ended = shared(tmp_path, conftest)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        ran: dict[str, set[str]] = {}
        for process in (tmp_path / "said").iterdir():
            for line in process.read_text().splitlines():
                ran.setdefault(Path(line).name, set()).add(process.name)
        assert len(ran) == len(FOLDERS) and len(set.union(*ran.values())) == 2
        return ran

    return run


def test_files_and_folders_stay_together(runs):
    ran = runs(CONFTEST.format(together=("tests/worker_processes",)))
    assert all(len(processes) == 1 for processes in ran.values())
    assert ran["test_0.py"] == ran["test_1.py"]


def test_control_a_folder_that_need_not_stay_together_is_shared(runs):
    ran = runs(CONFTEST.format(together=()))
    assert all(len(processes) == 1 for processes in ran.values())
    # These two files come first by name, and each process gets one of them before either begins.
    assert ran["test_2.py"] != ran["test_3.py"]


def test_remaining_tests_of_a_crashed_process_run(tmp_path):
    (tmp_path / "tests").mkdir()
    for name, text in CRASHING.items():
        (tmp_path / "tests" / name).write_text(text)
    ended = shared(tmp_path, CONFTEST.format(together=()))
    assert ended.returncode == 1 and "test_crash" in ended.stdout, ended.stdout + ended.stderr
    assert "1 failed, 3 passed" in ended.stdout and (tmp_path / "said" / "left").exists()
