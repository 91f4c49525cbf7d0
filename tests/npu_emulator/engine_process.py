"""Starts programs of this folder in processes of their own, on the emulated NPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(
    module: str, *arguments: object, python: str | Path = sys.executable, **variables: str
) -> subprocess.Popen[str]:
    """A process of `python` that runs `module` of this folder, with more environment `variables`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [python, "-W", "ignore", "-m", f"tests.npu_emulator.{module}", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment | variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], seconds: float = 900) -> str:
    """What the process printed; raises where it failed or took too long."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output
