"""Runs of `engine_program`, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.verl_patches.features.rollout_rebalance.cases import CASES

Found = dict[str, list[dict[str, Any]]]
"""By case, what every rank found."""


def run_cases(folder: Path, names: list[str]) -> Found:
    """What the ranks of these cases found; AssertionError with the end of what they printed where one fails."""
    environment = os.environ | {"NPU_EMULATOR_CAPACITY_MB": "512", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.verl_patches.features.rollout_rebalance.engine_program", str(folder), *names],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return {
        name: [json.loads((folder / name / f"found.{rank}.json").read_text()) for rank in range(CASES[name].ranks)]
        for name in names
    }
