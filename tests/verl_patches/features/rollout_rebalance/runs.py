"""Runs of `engine_program`, in a process of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.verl_patches.features.rollout_rebalance.cases import CASES
from tests.vllm_process import run_vllm

Found = dict[str, list[dict[str, Any]]]
"""By case, what every rank found."""


def run_cases(folder: Path, names: list[str]) -> Found:
    """What the ranks of these cases found; AssertionError with the end of what they printed where one fails."""
    run_vllm("tests.verl_patches.features.rollout_rebalance.engine_program", folder, *names)
    return {
        name: [json.loads((folder / name / f"found.{rank}.json").read_text()) for rank in range(CASES[name].ranks)]
        for name in names
    }
