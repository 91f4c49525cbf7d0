"""Runs a program of verl's engines on two ranks, and returns what each of them found."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ENGINES_2026
from tests.ranks import run_ranks
from tests.stack_2026.vllm_ascend.models import write_checkpoint

RANKS = 2


def run_engines(program: str, models: Iterable[str], folder: Path, timeout: float = 500) -> list[dict[str, Any]]:
    """Write tiny checkpoints of the models into `folder`, run the program, and return the results by rank.

    Args:
        program: module whose `main(folder)` writes ``RANK.json``.
        models: names of the checkpoints; equal ones are written once.
        folder: for checkpoints and results.
        timeout: seconds for all ranks together.
    """
    for model in set(models):
        write_checkpoint(model, folder / model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required by Megatron
        patch.setenv("OMP_NUM_THREADS", "1")
        run_ranks(program, RANKS, folder, timeout=timeout, imported=ENGINES_2026)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
