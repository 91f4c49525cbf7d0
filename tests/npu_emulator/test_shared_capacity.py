"""Processes that see the same die share its memory, and a process that has ended holds none of it."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
import torch_npu  # noqa: F401

from npu_emulator import counters
from tests.npu_emulator.device_process import DeviceProcess

MEBIBYTE = 1 << 20
CAPACITY = 160 * MEBIBYTE
# torch_npu asks CANN for such pieces as they are: it adds 32 bytes, and makes a multiple of 2 MiB.
PIECE = 20 * MEBIBYTE


@pytest.fixture
def node() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def start(node):
    """Start processes of the node; all of them end with the test."""
    processes = []

    def start(visible: str = "0", **environment: str) -> DeviceProcess:
        defaults = {
            "NPU_EMULATOR_NODE": node,
            "NPU_EMULATOR_CAPACITY_MB": str(CAPACITY // MEBIBYTE),
            "ASCEND_RT_VISIBLE_DEVICES": visible,
        }
        processes.append(DeviceProcess(**defaults | environment))
        return processes[-1]

    yield start
    for process in processes:
        process.__exit__()


def files_of(node: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"npu_emulator-*-{node}"))


def take(pieces: int, device: int) -> torch.Tensor:
    return torch.empty(pieces * PIECE - 32, dtype=torch.uint8, device=f"npu:{device}")


def hold(state: dict, pieces: int, device: int = 0) -> str:
    """Keep this much memory; an out-of-memory error is returned as text."""
    try:
        state.setdefault("held", []).append(take(pieces, device))
    except RuntimeError as error:
        assert "NPU out of memory" in str(error)
        return str(error)
    return ""


def let_go(state: dict, empty_cache: bool = True) -> None:
    state.clear()
    if empty_cache:
        torch.npu.empty_cache()


def free(state: dict, device: int = 0) -> int:
    return torch.npu.mem_get_info(device)[0]


def end_without_cleaning_up(state: dict) -> None:
    os._exit(0)


def fork_and_use(state: dict) -> int:
    """Return the exit code of a forked process that uses the die by itself."""
    child = os.fork()
    if child == 0:
        os._exit(0 if not hold({}, 3) and free({}) == CAPACITY - 3 * PIECE else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_die_is_full_for_all_of_its_processes(start):
    first, second = start(), start()
    assert first(hold, 5) == ""
    assert second(free) == first(free) == 3 * PIECE
    refusal = second(hold, 4)
    assert "Tried to allocate 80.00 MiB (NPU 0; 160.00 MiB total capacity; 0 bytes already allocated" in refusal
    assert "60.00 MiB free" in refusal
    assert second(hold, 3) == ""
    assert second(hold, 1) and first(free) == 0


def test_memory_returned_to_the_die_is_there_for_others(start):
    first, second = start(), start()
    first(hold, 6)
    assert second(hold, 4)
    first(let_go, False)
    assert second(hold, 4), "what the first process has reserved is not free"
    first(let_go)
    assert second(hold, 4) == "" and first(free) == 4 * PIECE


def test_dies_are_those_of_the_machine_whatever_their_number_in_the_process(start):
    first, second = start(visible="5,6"), start(visible="1,5")
    assert first(hold, 5, 0) == ""
    assert second(hold, 5, 1), "both mean die 5"
    assert second(hold, 5, 0) == "" and first(hold, 5, 1) == ""
    assert first(free, 0) == second(free, 1) == 3 * PIECE


def test_other_nodes_have_dies_of_their_own(start):
    first, second = start(), start(NPU_EMULATOR_NODE=f"other-{uuid.uuid4().hex}")
    assert first(hold, 6) == "" and second(hold, 6) == ""


def test_a_killed_process_returns_its_share(start):
    first, second, third = start(), start(), start()
    first(hold, 3)
    second(hold, 4)
    third(hold, 1)
    assert third(hold, 2)
    second.kill()
    assert third(free) == 4 * PIECE and third(hold, 4) == ""
    with pytest.raises((RuntimeError, EOFError)):
        first(end_without_cleaning_up)
    first.end()
    assert third(hold, 3) == "" and third(hold, 1)


def test_a_forked_process_counts_for_itself(start):
    assert start()(fork_and_use) == 0


def test_the_last_process_removes_the_file(start, node):
    first, second = start(), start()
    first(hold, 1)
    second(hold, 1)
    assert len(files_of(node)) == 1
    first.end()
    assert len(files_of(node)) == 1 and second(free) == 7 * PIECE
    second.end()
    assert not files_of(node)


def test_the_file_of_killed_processes_goes_with_the_next_one(start, node):
    first = start()
    first(hold, 1)
    first.kill()
    assert len(files_of(node)) == 1
    other = start(NPU_EMULATOR_NODE=f"other-{uuid.uuid4().hex}")
    other(free)
    other.end()
    assert not files_of(node)


def test_a_name_that_is_no_file_name_rejected(start):
    with pytest.raises(RuntimeError, match="NPU_EMULATOR_NODE must be at most 100 letters"):
        start(NPU_EMULATOR_NODE="../elsewhere")(hold, 1)


def test_many_processes_never_hold_more_than_there_is(start):
    """All take and return memory at the same time; each account equals its process's memory, to the byte."""
    processes = [start() for _ in range(4)]
    for process in processes:
        process(free)
    for seed, process in enumerate(processes):
        process.send(take_and_return, seed, 800)
    refusals = [process.receive() for process in processes]
    assert all(refusals), "the die was never full for one of them, so nothing was tested"
    reserved = [process(torch_reserved) for process in processes]
    assert 0 < sum(reserved) <= CAPACITY and processes[0](free) == CAPACITY - sum(reserved)
    for process in processes:
        process(let_go)
    assert processes[0](free) == CAPACITY and processes[0](hold, CAPACITY // PIECE) == ""


@pytest.mark.parametrize("change", [hold, free])
def test_accounts_are_looked_at_and_changed_under_the_lock_of_the_node(start, node, change):
    """While somebody else has the lock, nothing is taken; a process that does not ask for it answers at once."""
    process = start()
    process(free)
    (file,) = files_of(node)
    with file.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        process.send(change, *([3] if change is hold else []))
        assert not process.has_answered(within=1)
    assert process.receive() == ("" if change is hold else CAPACITY)


# Takes the lock of a file, says so, and waits.
HOLDER = """
import fcntl, sys
with open(sys.argv[1], "rb") as opened:
    fcntl.flock(opened, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("change", [hold, free])
def test_a_process_that_was_stopped_with_the_lock_does_not_stop_the_others(start, node, change):
    """Python's lock is held while memory is taken, so that they could not even say that they wait for a rank. The
    control is the test above: for a process that runs they wait."""
    process = start()
    process(free)
    (file,) = files_of(node)
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        process.send(change, *([3] if change is hold else []))
        assert not process.has_answered(within=1)
        holder.send_signal(signal.SIGSTOP)
        assert process.receive() == ("" if change is hold else CAPACITY)
        holder.kill()


def test_full_die_used_by_one_process_at_a_time(start):
    """Each tries for more than half of the die without a pause; whoever gets it must be the only one."""
    processes = [start() for _ in range(4)]
    for process in processes:
        process(free)
    for process in processes:
        process.send(have_the_die_alone, 1000)
    turns = [process.receive() for process in processes]
    assert all(turns) and processes[0](free) == CAPACITY


def torch_reserved(state: dict) -> int:
    return torch.npu.memory_reserved(0)


def check_account() -> None:
    """Check that this process's account equals the memory that torch_npu's allocator keeps."""
    assert counters.memory_statistics(0)["allocated"] == torch.npu.memory_reserved(0)


def take_and_return(state: dict, seed: int, rounds: int) -> int:
    """Return how often memory ran out. Tensors that are left at the end stay."""
    drawn, refused, held = random.Random(seed), 0, state.setdefault("held", [])
    for _ in range(rounds):
        if drawn.random() < 0.6:
            try:
                held.append(torch.empty(drawn.randint(1, 2 * PIECE), dtype=torch.uint8, device="npu:0"))
            except RuntimeError as error:
                assert "NPU out of memory" in str(error)
                refused += 1
        elif held:
            del held[drawn.randrange(len(held))]
        if drawn.random() < 0.4:
            torch.npu.empty_cache()
        check_account()
    return refused


def have_the_die_alone(state: dict, rounds: int) -> int:
    """Return the number of times that this process got it."""
    turns = 0
    for _ in range(rounds):
        if not hold(state, 5):
            turns += 1
            assert free(state) == 3 * PIECE
        let_go(state)
    return turns
