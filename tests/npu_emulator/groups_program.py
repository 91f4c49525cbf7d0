"""One of two ranks that give collectives of two groups in opposite orders; started by `test_streams`.

    python -m tests.npu_emulator.groups_program RANK STORE RESULT free|chained

Each group has a stream of its own, so that they do not wait for each other: a device does both. When ``chained``, the
second one must wait for the first, which on the other rank is the one that waits: nobody gets on. RESULT becomes a JSON
list of the sums, or the text that was raised.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401


def sums(rank: int, is_chained: bool) -> list[float]:
    """Return the results of two sums over both ranks, the first group's first."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:  # communicators are made when they are first used, by all ranks in one order
        dist.all_reduce(torch.zeros(1, device="npu"), group=group)
    torch.npu.synchronize()
    totals = [torch.full((4,), float(number + rank), device="npu") for number in (1, 10)]
    works = {}
    for number in (0, 1) if rank == 0 else (1, 0):
        works[number] = dist.all_reduce(totals[number], group=groups[number], async_op=True)
        if is_chained:
            works[number].wait()
    for work in works.values():
        work.wait()
    return [total[0].item() for total in totals]


def main() -> None:
    rank, store, result, order = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    torch.npu.set_device(rank)
    dist.init_process_group(
        "hccl", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    try:
        answer: object = sums(rank, order == "chained")
    except RuntimeError as error:
        answer = str(error)
    result.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
