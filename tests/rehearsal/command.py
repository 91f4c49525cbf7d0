"""Runs a rehearsal for a test."""

import os
import subprocess
import sys
from pathlib import Path

from rehearsal.plan import ROOT
from tests.shared_templates import started_with


def rehearse(output: Path, *arguments: str) -> None:
    """Run a rehearsal into the folder `output`; raise AssertionError with its output if it fails."""
    run_rehearsal("--output", str(output), *arguments)


def run_rehearsal(*arguments: str) -> str:
    """Run a rehearsal, and return its standard output; raise AssertionError with its output if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.shared_training", *arguments],
        cwd=ROOT, env=started_with(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
