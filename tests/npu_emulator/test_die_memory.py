"""Memory of a die as on a device: pages, and the memory that CANN and HCCL hold beside programs."""

import json
import os

import pytest

from tests.npu_emulator.engine_process import finish, start

RANKS = 2
# Dies of their own: other tests of this run hold memory of theirs.
NODE = {"NPU_EMULATOR_NODE": f"die-memory-{os.getpid()}"}
OUT_OF_MEMORY, INVALID = 207001, 100000


def answer(tmp_path, check: str, **variables: str):
    result = tmp_path / "result.json"
    finish(start("die_memory_program", result, check, **NODE, **variables))
    return json.loads(result.read_text())


def of_ranks(tmp_path, check: str = "buffers", **variables: str) -> list:
    results = [tmp_path / f"{rank}.json" for rank in range(RANKS)]
    processes = [
        start("die_memory_program", result, check, rank, tmp_path / "store", **NODE, **variables)
        for rank, result in enumerate(results)
    ]
    for process in processes:
        finish(process)
    return [json.loads(result.read_text()) for result in results]


def test_blocks_take_whole_pages(tmp_path):
    """CANN's API reference: aclrtMalloc adds 32 bytes, and a huge page has 2 MiB. One that is cut is taken whole."""
    frame = 2048
    assert answer(tmp_path, "sizes") == [frame, 2 * frame, 2 * frame, frame, 2 * frame, frame]


def test_small_blocks_that_stay_keep_frames_from_large_ones(tmp_path):
    found = answer(tmp_path, "fragmentation", NPU_EMULATOR_CAPACITY_MB="16")
    assert found["taken"] == [4, 4, 16, 16]
    large, after_one_was_freed, huge, huge_or_normal, small = found["codes"]
    assert (large, after_one_was_freed) == (OUT_OF_MEMORY, 0)
    assert (huge, huge_or_normal, small) == (OUT_OF_MEMORY, 0, OUT_OF_MEMORY)


def test_zero_and_excessive_sizes_rejected(tmp_path):
    assert answer(tmp_path, "refusals", NPU_EMULATOR_CAPACITY_MB="64") == [INVALID, 0, OUT_OF_MEMORY]


@pytest.mark.parametrize(("setting", "taken"), [("24", 24), ("0", 0)])
def test_a_process_takes_its_context_of_a_die_and_gives_it_back(tmp_path, setting, taken):
    assert answer(tmp_path, "context", NPU_EMULATOR_CONTEXT_MB=setting) == {"taken": taken, "reset": 0}


@pytest.mark.parametrize(("counted", "held"), [("1", [0, 16, 16, 32, 40, 0]), ("0", [0] * 6)])
def test_a_communicator_has_its_two_buffers_from_its_first_collective_on(tmp_path, counted, held):
    """Two ranks that send to each other have a communicator for that, with buffers of P2P_HCCL_BUFFSIZE."""
    sizes = {"HCCL_BUFFSIZE": "8", "P2P_HCCL_BUFFSIZE": "4", "NPU_EMULATOR_HCCL_BUFFERS": counted}
    assert of_ranks(tmp_path, **sizes) == [{"held": held}] * RANKS


def test_buffers_that_do_not_fit_are_named_with_what_makes_them_smaller(tmp_path):
    """One communicator fits, and the second does not."""
    # Without torch_npu's queue, whose thread may tell of it after the host has waited: the host would be in the next
    # group's beginning by then, which waits for the other rank.
    small = {"HCCL_BUFFSIZE": "8", "NPU_EMULATOR_HCCL_BUFFERS": "1", "NPU_EMULATOR_CAPACITY_MB": "24"}
    small |= {"TASK_QUEUE_ENABLE": "0"}
    for found in of_ranks(tmp_path, **small):
        assert found["held"] == [0, 16, 16]
        assert "two buffers of 8 MiB" in found["error"] and "lower HCCL_BUFFSIZE" in found["error"]


def test_every_communicator_has_a_name_of_its_own_and_all_ranks_know_it_by_that(tmp_path):
    one, other = of_ranks(tmp_path, "names")
    assert one == other and len(set(one)) == len(one) == 4
