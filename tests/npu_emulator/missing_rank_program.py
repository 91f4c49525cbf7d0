"""Runs on each of three ranks: one does not take part in a collective, has no memory for it, or dies.

`main(folder)` writes the errors of each rank to ``rank<r>.json``. With TASK_QUEUE_ENABLE=0 an error is raised at its
call, and the ranks go on; torch_npu's queue would do no more work after it.
"""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from npu_emulator import counters

TIMEOUT_S = 2
ABSENT = 2
ELEMENTS = 1 << 20  # not so few that the allocator keeps them together with others


def told(action: Callable[[], object]) -> str:
    """Return the error of an action; empty if it succeeds."""
    try:
        action()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Limit HCCL's wait for other ranks to a moment."""
    os.environ["HCCL_EXEC_TIMEOUT"] = str(TIMEOUT_S)
    try:
        yield
    finally:
        del os.environ["HCCL_EXEC_TIMEOUT"]


@contextlib.contextmanager
def full_die() -> Iterator[None]:
    """Keep torch_npu from getting more memory."""
    torch.npu.synchronize()
    torch.npu.empty_cache()
    capacity = counters.memory_statistics(torch.npu.current_device())["capacity"]
    torch.npu.set_per_process_memory_fraction(torch.npu.memory_reserved() / capacity)
    try:
        yield
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)


def new_group() -> dist.ProcessGroup:
    """Return a group of all ranks with its communicator, which is created at the first use."""
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1, device="npu"), group=group)
    return group


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=30))
    without, full = new_group(), new_group()
    tensor = torch.ones(4, device="npu")
    dist.all_reduce(tensor)
    found = {"together": tensor.tolist()}
    if rank != ABSENT:
        with impatient():
            found["absent"] = told(lambda: dist.all_reduce(tensor, group=without))
    dist.barrier()
    given, parts = torch.ones(ELEMENTS, device="npu"), [torch.empty(ELEMENTS, device="npu") for _ in range(3)]
    with full_die() if rank == ABSENT else impatient():
        found["full"] = told(lambda: dist.all_gather(parts, given, group=full))
    dist.barrier()
    if rank == ABSENT:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        os._exit(0)
    found["dead"] = told(lambda: dist.all_gather_into_tensor(torch.empty(12, device="npu"), tensor))
    found["alive"] = (tensor.cpu() + 1).tolist()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    # Rank 0 has the store, which is needed as long as another rank lives.
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["reported"])
    else:
        store.set("reported", "")
    os._exit(0)  # the group cannot be taken down without the rank that is gone
