"""Runs a rehearsal for a test."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rehearse(output: Path, *arguments: str) -> None:
    """Run a rehearsal into the folder `output`; raise AssertionError with its output if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", "rehearsal", "--output", str(output), *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
