"""hccl on four ranks, in two sets of processes: the checks are those of the two programs."""

import json
from pathlib import Path

import pytest

from tests.forked import PYTORCH
from tests.npu_emulator import collectives_program, refused_collectives_program
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def found_by(program: str, folder: Path) -> list[dict[str, str]]:
    run_ranks(f"tests.npu_emulator.{program}", 4, folder, imported=PYTORCH)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    return found_by("collectives_program", tmp_path_factory.mktemp("hccl"))


@pytest.fixture(scope="module")
def refusals(tmp_path_factory) -> list[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASK_QUEUE_ENABLE", "0")
        patch.setenv("NPU_EMULATOR_STRICT", "1")
        patch.setenv("NPU_EMULATOR_CHIP", "Ascend910B3")  # which has the products that are summed over ranks
        return found_by("refused_collectives_program", tmp_path_factory.mktemp("refused"))


def assert_right(results: list[dict[str, str]], check: str) -> None:
    failures = [
        f"rank {rank}: {found.get(check, 'not reached')}"
        for rank, found in enumerate(results)
        if found.get(check) != ""
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("check", [function.__name__ for function in collectives_program.CHECKS])
def test_on_four_ranks(results, check):
    assert_right(results, check)


@pytest.mark.parametrize("check", [function.__name__ for function in refused_collectives_program.CHECKS])
def test_rejected_on_four_ranks(refusals, check):
    assert_right(refusals, check)
