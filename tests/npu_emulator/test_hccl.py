"""hccl on four ranks, in one set of processes: see collectives_program.py for the checks."""

import json
from pathlib import Path

import pytest

from tests.npu_emulator import collectives_program
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("hccl")
    run_ranks("tests.npu_emulator.collectives_program", 4, folder, timeout=240)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("check", [function.__name__ for function in collectives_program.CHECKS])
def test_on_four_ranks(results, check):
    failures = [
        f"rank {rank}: {found.get(check, 'not reached')}"
        for rank, found in enumerate(results)
        if found.get(check) != ""
    ]
    assert not failures, "\n".join(failures)
