"""Every shell script for users prints a one-page help at once, and does nothing else."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(file.name for file in (ROOT / "scripts").glob("*.sh"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy the scripts into a checkout in which nothing has been set up."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_one_page_and_changes_nothing(name, copy):
    before = sorted(copy.rglob("*"))
    done = subprocess.run(
        ["bash", copy / "scripts" / name, "--help"], cwd=copy, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(copy)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: bash scripts/")
    assert len(done.stdout.splitlines()) <= 40
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize("arguments", [["--help-me"], ["--upgrade", "x"]])
def test_unknown_argument_of_update_locks_rejected(copy, arguments):
    done = subprocess.run(["bash", copy / "scripts" / "update_locks.sh", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f'error: Unknown argument "{arguments[-1]}": see --help.\n'
