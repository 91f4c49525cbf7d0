"""Trainings whose ranks are killed at an exact point end bit-identical to the unbroken one.

scripts/prove_resume.py kills whole jobs with Ray and a rollout; here a point takes seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.plan import ROOT
from rehearsal.resume_proof.points import draw_points
from rehearsal.resume_proof.stops import AFTER_RENAME, BEFORE_RENAME, CHUNK, FILE
from tests.verl_patches.features.training_checkpoint.test_fsdp import write_models

# Precision, place, step, rank, and which write; rank 0 does the driver's work.
FOUR = [
    ("float32", CHUNK, 2, 1, 7),
    ("float32", BEFORE_RENAME, 3, 0, 1),
    ("bfloat16", FILE, 2, 0, 1),
    ("bfloat16", "update", 3, 1, 1),
]


def found_after(folder: Path, points: list[tuple]) -> list[dict]:
    write_models(folder)
    (folder / "points.json").write_text(json.dumps(points))
    program = "tests.verl_patches.features.training_checkpoint.killed_program"
    ended = subprocess.run(
        [sys.executable, "-m", program, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_four_kills_are_survived_to_the_bit(tmp_path):
    found = found_after(tmp_path, FOUR)
    assert [point["after"] for point in found] == [1, 2, 1, 2]
    assert all((point["steps"], point["differing"]) == (3, []) for point in found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_twenty_kills_are_survived_to_the_bit(tmp_path, precision):
    """Points are drawn over the update, every write of a rank's file, its last write, and both sides of the rename."""
    places = ("update", CHUNK, FILE, BEFORE_RENAME, AFTER_RENAME)
    drawn = [point.stop for point in draw_points(20, 1, 2, 3, places)]
    points = [(precision, stop.place, stop.step, max(stop.rank, 0), stop.number) for stop in drawn]
    found = found_after(tmp_path, points)
    assert len(found) == 20 and not [point for point in found if point["differing"] or not point["after"]]
