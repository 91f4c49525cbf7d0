"""Run a program that uses vLLM's engine in a separate process that leaves nothing outside its folder."""

import os
import subprocess
import sys
from pathlib import Path


def run_vllm(program: str, folder: Path, *arguments: str, seconds: float = 1500) -> None:
    """Run the module `program` with `folder` and `arguments`; on failure raise AssertionError with its last output."""
    environment = {
        **os.environ,
        "NPU_EMULATOR_CAPACITY_MB": "512",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(folder),  # sockets, which are never removed
    }
    command = [sys.executable, "-W", "ignore", "-m", program, str(folder), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
