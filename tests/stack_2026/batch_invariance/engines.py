"""Run engines of `verl_plugin.batch_invariance.worker`, each on its own emulated die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_plugin.batch_invariance.jobs import Job


def run_engine(job: Job, mode: str, folder: Path) -> dict[str, Any]:
    """Run an engine in its own process, and return its results."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    environment = os.environ | {
        "VLLM_BATCH_INVARIANT": mode, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(folder),
        "NPU_EMULATOR_DEVICES": "1", "NPU_EMULATOR_CAPACITY_MB": "1024", "OMP_NUM_THREADS": "1",
        "NPU_EMULATOR_NODE": f"batch_invariance.{os.getpid()}.{folder.name}", "VLLM_RPC_BASE_PATH": str(folder),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "verl_plugin.batch_invariance.worker"]
    ended = subprocess.run(
        [*command, str(folder / "job.json"), str(folder / "result.json")],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())
