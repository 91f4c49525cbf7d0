"""One of two ranks, of which rank 0 sends and ends before rank 1 receives; started by `test_messages`.

    python -m tests.npu_emulator.message_program RANK STORE RESULT GATE returns|destroys|killed|silent

RESULT of rank 0 becomes the names of the files that it has mapped, and RESULT of rank 1 what it received, or the text
that was raised. Rank 1 receives when there is a line in GATE, a named pipe.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from tests.npu_emulator.mapped_files import mapped_files

ELEMENTS = 100_000


def send(result: Path, ending: str) -> None:
    dist.recv(torch.empty(1, device="npu"), 1)  # the communicator of the two is there
    if ending != "silent":
        dist.send(torch.arange(ELEMENTS, device="npu"), 1)
    torch.npu.synchronize()
    result.write_text(json.dumps(mapped_files()))
    if ending == "destroys":
        dist.destroy_process_group()
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def receive(result: Path, gate: Path) -> None:
    dist.send(torch.ones(1, device="npu"), 0)
    received = torch.empty(ELEMENTS, dtype=torch.int64, device="npu")
    gate.open().readline()
    try:
        dist.recv(received, 0)
        torch.npu.synchronize()
        answer: object = bool((received.cpu() == torch.arange(ELEMENTS)).all())
    except RuntimeError as error:
        answer = str(error)
    result.write_text(json.dumps(answer))


def main() -> None:
    rank, store, ending = int(sys.argv[1]), sys.argv[2], sys.argv[5]
    result, gate = Path(sys.argv[3]), Path(sys.argv[4])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    if rank == 0:
        send(result, ending)
    else:
        receive(result, gate)


if __name__ == "__main__":
    main()
