"""One rank of a group over HCCL on the second engine; started by `test_cann_engine` with NPU_EMULATOR_ENGINE=cann.

    python -m tests.npu_emulator.cann.hccl_program RANK RANKS STORE RESULT [leave]

Runs collectives with values that follow from ranks, and writes {name: equal to what the CPU computes} into RESULT.
With ``leave``, rank 1 ends without a word before the last collective, and the others write what they are told.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import npu_emulator_engine
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401


def of_rank(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(6) * 3 + 10 * rank).to(dtype)


def collectives(rank: int, ranks: int, device: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, result, and what it should be."""
    every = range(ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = of_rank(rank, dtype).to(device)
        dist.all_reduce(tensor)
        yield f"all_reduce {dtype}", tensor, sum(of_rank(r, dtype) for r in every)
    tensor = of_rank(rank).to(device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    yield "all_reduce max", tensor, of_rank(ranks - 1)
    gathered = torch.empty(ranks * 6, device=device)
    dist.all_gather_into_tensor(gathered, of_rank(rank).to(device))
    yield "all_gather", gathered, torch.cat([of_rank(r) for r in every])
    part = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(3.0 * ranks, device=device) + rank)
    expected = sum(torch.arange(3.0 * ranks) + r for r in every)
    yield "reduce_scatter", part, expected[rank * 3 : rank * 3 + 3]
    sizes = [[r + s + 1 for s in every] for r in every]  # from r to s
    given = torch.cat([torch.full((size,), 100.0 * rank + s) for s, size in enumerate(sizes[rank])])
    received = torch.empty(sum(sizes[r][rank] for r in every), device=device)
    dist.all_to_all_single(received, given.to(device), [sizes[r][rank] for r in every], sizes[rank])
    yield "all_to_all", received, torch.cat([torch.full((sizes[r][rank],), 100.0 * r + rank) for r in every])
    tensor = of_rank(rank).to(device)
    dist.broadcast(tensor, ranks - 1)
    yield "broadcast", tensor, of_rank(ranks - 1)
    incoming = [torch.empty(6, device=device) for _ in range(2)]
    there, back = (rank + 1) % ranks, (rank - 1) % ranks
    sends = [dist.P2POp(dist.isend, of_rank(rank + shift).to(device), there) for shift in (0, 7)]
    receives = [dist.P2POp(dist.irecv, tensor, back) for tensor in incoming]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    yield "batch_isend_irecv", torch.stack(incoming), torch.stack([of_rank(back), of_rank(back + 7)])


def counts() -> str:
    function = npu_emulator_engine.library().npu_emulator_hccl_counts
    function.restype = ctypes.c_char_p
    return function().decode()


def main() -> None:
    rank, ranks, store, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.npu.set_device(rank)
    dist.init_process_group(
        "hccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    answers = {"equal": {}}
    for name, computed, expected in collectives(rank, ranks, f"npu:{rank}"):
        answers["equal"][name] = torch.equal(computed.cpu(), expected)
    answers["counts"] = counts()
    if "leave" in sys.argv:
        if rank == 1:
            os._exit(0)
        try:
            dist.all_reduce(torch.ones(2, device=f"npu:{rank}"))
            torch.npu.synchronize()
        except Exception as error:
            answers["told"] = str(error)
        result.write_text(json.dumps(answers))
        os._exit(0)  # the group cannot be taken down without the rank that is gone
    result.write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
