"""Runs of `engine_program`, in a separate process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.verl_patches.features.rollout_rebalance.cases import CASES
from tests.vllm_process import run_vllm

Found = dict[str, list[dict[str, Any]]]
"""The results of every rank, by case."""


def run_cases(folder: Path, names: list[str]) -> Found:
    """Run these cases and return the results of every rank. On a failure, AssertionError has the end of the output."""
    run_vllm("tests.verl_patches.features.rollout_rebalance.engine_program", folder, *names)
    return {
        name: [json.loads((folder / name / f"found.{rank}.json").read_text()) for rank in range(CASES[name].ranks)]
        for name in names
    }
