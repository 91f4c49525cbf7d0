"""Profiles open in Ascend's msprof-analyze, if requirements/profiles.lock is installed in .venv/profiles."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[4]
READERS = ROOT / ".venv" / "profiles"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not READERS.is_dir(), reason="NOT RUN: requirements/profiles.lock is not installed in .venv/profiles"
    ),
]


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Path:
    """Return the folder of a step that two ranks recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    run_ranks("tests.verl_patches.features.profile.recorded_program", 2, folder, 120, imported=PYTORCH)
    return folder / "profile" / "step_1"


def read(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(READERS)}
    command = [sys.executable, READERS / "bin" / "msprof-analyze", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)


def complaints(ended: subprocess.CompletedProcess) -> list[str]:
    return [line for line in (ended.stdout + ended.stderr).splitlines() if "[ERROR]" in line or "Traceback" in line]


def test_the_advisor_looks_at_a_rank(step, tmp_path):
    ended = read(tmp_path, "advisor", "all", "-d", *step.glob("rank_0_*"))
    assert ended.returncode == 0 and not complaints(ended), ended.stderr[-3000:]
    (page,) = tmp_path.glob("mstt_advisor_*.html")
    assert "Performance" in page.read_text()


def test_a_cluster_is_made_of_all_ranks(step, tmp_path):
    ended = read(tmp_path, "cluster", "-d", step, "-o", tmp_path / "out")
    assert ended.returncode == 0 and not complaints(ended), ended.stderr[-3000:]
    (table,) = tmp_path.rglob("cluster_step_trace_time.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["Index"] for row in rows if row["Type"] == "rank"} == {"0", "1"}


def test_incomplete_profile_detected(step, tmp_path):
    """The control: a rank without its table of steps is not part of any cluster."""
    for rank in step.iterdir():
        made = tmp_path / "step_1" / rank.name
        for file in (file for file in rank.rglob("*") if file.is_file() and file.name != "step_trace_time.csv"):
            copied = made / file.relative_to(rank)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.read_bytes())
    read(tmp_path, "cluster", "-d", tmp_path / "step_1", "-o", tmp_path / "out")
    assert not list(tmp_path.rglob("cluster_step_trace_time.csv"))
