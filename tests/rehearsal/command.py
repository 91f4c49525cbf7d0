"""A rehearsal as a test starts it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rehearse(output: Path, *arguments: str) -> None:
    """Run one to its end, into the folder `output`; AssertionError with what it printed where it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", "rehearsal", "--output", str(output), *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
