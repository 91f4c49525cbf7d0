"""Run engines of `verl_plugin.batch_invariance.worker`, each on its own emulated die."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests import forked
from verl_plugin.batch_invariance.cache import make_cache
from verl_plugin.batch_invariance.jobs import Job


def run_engine(job: Job, mode: str, folder: Path) -> dict[str, Any]:
    """Run an engine in its own process, and return its results."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    cache = str(make_cache(folder / "compiled"))
    environment = os.environ | {
        "VLLM_BATCH_INVARIANT": mode, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": cache,
        "NPU_EMULATOR_DEVICES": "1", "NPU_EMULATOR_CAPACITY_MB": "1024", "OMP_NUM_THREADS": "1",
        "NPU_EMULATOR_NODE": f"batch_invariance.{os.getpid()}.{folder.name}", "VLLM_RPC_BASE_PATH": str(folder),
    }  # fmt: skip
    process = forked.start(
        forked.PYTORCH, "verl_plugin.batch_invariance.worker", folder / "job.json", folder / "result.json",
        environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-6000:]
    return json.loads((folder / "result.json").read_text())
