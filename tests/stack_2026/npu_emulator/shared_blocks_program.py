"""Pass a tensor between two processes of one die as PyTorch does: `reduce_tensor` in one, `rebuild` in the other.

``python -m tests.stack_2026.npu_emulator.shared_blocks_program`` prints the results of both as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection

ELEMENTS = 3 << 20


def held() -> int:
    """Return the bytes of the die that this process is charged for."""
    from npu_emulator import counters

    return counters.memory_statistics(0)["allocated"]


def free_bytes() -> int:
    import torch

    return torch.npu.mem_get_info()[0]


def importer(connection: Connection) -> None:
    """Receive a tensor from the other process, read it, write to it, and release it."""
    import torch
    import torch_npu  # noqa: F401

    from npu_emulator import meters

    torch.npu.set_device(0)
    torch.ones(1, device="npu")
    before, free_before = held(), free_bytes()
    rebuild, arguments = connection.recv()
    given = rebuild(*arguments)
    found = {"mean": given.mean(dtype=torch.float32).item(), "shape": list(given.shape), "own": held() - before}
    found["free"] = free_before - free_bytes()
    copies = meters.snapshot()["copies"]["device_to_device"]["bytes"]
    mine = torch.empty_like(given).copy_(given)
    torch.npu.synchronize()
    found["copied"] = meters.snapshot()["copies"]["device_to_device"]["bytes"] - copies
    found["same"] = torch.equal(mine.cpu(), given.cpu())
    given[1] = 7
    torch.npu.synchronize()
    connection.send(found)
    connection.recv()
    del given
    connection.send("forgotten")
    rebuild, arguments = connection.recv()
    try:
        rebuild(*arguments)
    except RuntimeError as error:
        connection.send(str(error))
    else:
        connection.send("accepted")


def main() -> None:
    import torch
    import torch_npu  # noqa: F401
    from torch.multiprocessing.reductions import reduce_tensor

    torch.npu.set_device(0)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=importer, args=(there,))
    other.start()
    tensor = torch.arange(ELEMENTS, dtype=torch.int32).remainder(977).to(torch.bfloat16).npu()
    address = tensor.data_ptr()
    here.send(reduce_tensor(tensor))
    found = here.recv()
    found |= {"expected mean": tensor.float().mean().item(), "written": tensor[1].item()}
    found["address kept"] = tensor.data_ptr() == address
    here.send("go on")
    here.recv()
    rebuild, arguments = reduce_tensor(torch.ones(ELEMENTS, device="npu"))
    handle = next(argument for argument in arguments if isinstance(argument, bytes) and len(argument) > 60)
    unknown = handle[:2] + b"999999999 3 0 4096".ljust(len(handle) - 2, b"\0")
    here.send((rebuild, tuple(unknown if argument is handle else argument for argument in arguments)))
    found["unknown"] = here.recv()
    other.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
