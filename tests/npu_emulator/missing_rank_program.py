"""Runs on each of three ranks: one does not take part in a collective, or dies.

`main(folder)` writes what the others were told to ``rank<r>.json``.
"""

import datetime
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from npu_emulator import _C

TIMEOUT = 2.0
ABSENT = 2


def outcome(action) -> dict:
    """The error that an action ends with, and how long it took in seconds."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"type": None, "text": "", "seconds": time.monotonic() - start}


def gather_on_a_full_die(rank: int, group) -> None:
    """A collective for which one rank has no memory left."""
    tensor, parts = torch.ones(1024, device="npu"), [torch.empty(1024, device="npu") for _ in range(3)]
    capacity = _C.memory_statistics(rank)["capacity"]
    if rank == ABSENT:
        # Enough for torch to print the tensors with the error, not for the flat copy of the list.
        _C.set_capacity(rank, torch.npu.memory_allocated() + 8192)
    try:
        dist.all_gather(parts, tensor, group=group)
    finally:
        _C.set_capacity(rank, capacity)


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=30))
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    tensor = torch.ones(4, device="npu")
    dist.all_reduce(tensor, group=impatient)
    found = {"together": tensor.tolist()}
    if rank != ABSENT:
        found["absent"] = outcome(lambda: dist.all_reduce(tensor, group=impatient))
    dist.barrier()
    found["full"] = outcome(
        lambda: gather_on_a_full_die(rank, dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT)))
    )
    dist.barrier()
    if rank == ABSENT:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        os._exit(0)
    found["dead"] = outcome(lambda: dist.all_gather_into_tensor(torch.empty(12, device="npu"), tensor))
    found["alive"] = (tensor.cpu() + 1).tolist()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    # Rank 0 has the store, in which the others look for who is missing.
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["reported"])
    else:
        store.set("reported", "")
    os._exit(0)
