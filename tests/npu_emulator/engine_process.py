"""Starts programs of this folder in processes of their own, on the emulated NPU."""

import os
import subprocess
import sys
from pathlib import Path

from tests import forked

ROOT = Path(__file__).parents[2]


def start(
    module: str, *arguments: object, python: str | Path = sys.executable, **variables: str
) -> subprocess.Popen[str]:
    """Start a process of `python` that runs `module` of this folder, with further environment `variables`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    return forked.start(
        forked.PYTORCH, f"tests.npu_emulator.{module}", *arguments, environment=environment, python=python, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], seconds: float = 900) -> str:
    """Wait for a process and return its output; raises if it failed or took too long."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output
