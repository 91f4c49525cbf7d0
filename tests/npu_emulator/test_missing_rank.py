"""A rank that does not come, or dies, ends a collective with an error that names it, in time, and no crash."""

import json
import re

import pytest

from tests.forked import PYTORCH
from tests.npu_emulator.missing_rank_program import TIMEOUT_S
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("missing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASK_QUEUE_ENABLE", "0")
        run_ranks("tests.npu_emulator.missing_rank_program", 3, folder, timeout=300, imported=PYTORCH)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


@pytest.fixture
def told(reports) -> list[dict]:
    """The errors reported to the ranks that stay."""
    return reports[:2]


def waited_s(text: str) -> float:
    return float(re.search(r"no answer after (\S+) s", text)[1])


def test_with_every_rank_nothing_fails(reports):
    assert [rank["together"] for rank in reports] == [[3.0] * 4] * 3


def test_an_absent_rank_is_named_after_the_timeout(told):
    for rank, found in enumerate(told):
        assert f"HcclAllReduce on rank {rank} of 3: no answer" in found["absent"]
        assert found["absent"].endswith("s from rank 2 (last in HcclAllReduce)")
        assert waited_s(found["absent"]) >= TIMEOUT_S


def test_a_rank_without_memory_is_told_so_and_named_to_the_others(reports, told):
    assert "NPU out of memory. Tried to allocate" in reports[2]["full"] and "(NPU 2;" in reports[2]["full"]
    for rank, found in enumerate(told):
        assert f"HcclAllGather on rank {rank} of 3: no answer" in found["full"]
        assert found["full"].endswith("s from rank 2 (last in HcclAllReduce)")
        assert waited_s(found["full"]) >= TIMEOUT_S


def test_dead_rank_named_while_others_continue(told):
    for rank, found in enumerate(told):
        assert f"HcclAllGather on rank {rank} of 3: no answer" in found["dead"]
        assert "rank 2 (its process has ended, last in HcclAllReduce)" in found["dead"]
        assert found["alive"] == [4.0] * 4
