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
    if rank == ABSENT:
        os._exit(0)
    found["dead"] = outcome(lambda: dist.all_gather_into_tensor(torch.empty(12, device="npu"), tensor))
    found["alive"] = (tensor.cpu() + 1).tolist()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    os._exit(0)
