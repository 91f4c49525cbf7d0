"""A rank that does not come, or dies, ends a collective with an error that names it, in time, and no crash."""

import json

import pytest

from tests.npu_emulator.missing_rank_program import TIMEOUT
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("missing")
    run_ranks("tests.npu_emulator.missing_rank_program", 3, folder, timeout=120)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


@pytest.fixture
def told(reports) -> list[dict]:
    """What the ranks that stay were told."""
    return reports[:2]


@pytest.fixture
def full_rank(reports) -> dict:
    return reports[2]["full"]


def test_with_every_rank_nothing_fails(told):
    assert [rank["together"] for rank in told] == [[3.0] * 4] * 2


def test_an_absent_rank_is_named_after_the_timeout(told):
    for rank, found in enumerate(told):
        absent = found["absent"]
        assert absent["type"] == "DistBackendError"
        assert f"hccl: all_reduce (collective 1 of its group) failed on rank {rank}" in absent["text"]
        assert "of 3 ranks, these did not take part: 2" in absent["text"]
        assert absent["seconds"] >= TIMEOUT * 0.9


def test_a_rank_without_memory_is_told_so_and_named_to_the_others(told, full_rank):
    assert full_rank["type"] == "OutOfMemoryError"
    assert "Tried to allocate 12.00 KiB (NPU 2" in full_rank["text"]
    for found in told:
        assert found["full"]["type"] == "DistBackendError"
        assert "hccl: all_gather" in found["full"]["text"] and "did not take part: 2" in found["full"]["text"]
        assert found["full"]["seconds"] >= TIMEOUT * 0.9


def test_a_dead_rank_is_named_and_the_others_go_on(told):
    for found in told:
        assert found["dead"]["type"] == "DistBackendError"
        assert "hccl: all_gather" in found["dead"]["text"] and "did not take part: 2" in found["dead"]["text"]
        assert len(found["alive"]) == 4
