"""One rank of a group over HCCL; started by `test_engine`.

    python -m tests.npu_emulator.hccl_program RANK RANKS STORE RESULT [leave]

Runs collectives with values that follow from ranks, and writes {name: equal to what the CPU computes} into RESULT.
With ``leave``, rank 1 ends silently before the last collective, and the others write the errors that they get.
"""

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from npu_emulator import meters


def of_rank(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(6) * 3 + 10 * rank).to(dtype)


def collectives(rank: int, ranks: int, device: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, result, and expected result."""
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


def expert_exchange(rank: int, ranks: int, device: str, group: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Send tokens to experts that multiply by their number, and back; yield name, result, and expected result."""
    tokens, size, k, experts = 5, 8, 2, 3 * ranks
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (tokens, size), generator=generator).half()  # float32 is rejected
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]).int()
    weights = torch.randint(1, 5, (tokens, k), generator=generator).float()
    expected = (((ids + 1) * weights).sum(1, keepdim=True) * x).half()
    place = (group, ranks, rank, experts)
    for version in ("", "_v2"):
        dispatch = getattr(torch_npu, f"npu_moe_distribute_dispatch{version}")
        combine = getattr(torch_npu, f"npu_moe_distribute_combine{version}")
        rows, _, origins, per_expert, received, *_ = dispatch(x.to(device), ids.to(device), *place)
        numbers = torch.arange(3 * rank, 3 * rank + 3) + 1
        factors = numbers.repeat_interleave(per_expert.cpu()).half().unsqueeze(1)
        computed = torch.zeros_like(rows)
        computed[: len(factors)] = rows[: len(factors)] * factors.to(device)
        result = combine(computed, ids.to(device), origins, received, weights.to(device), *place)
        yield f"dispatch and combine{version}", result, expected
        if not version:  # op-plugin's own test gives them so
            result = combine(computed, ids.to(device), origins.view(tokens, k), received, weights.to(device), *place)
            yield "combine with a row of origins for each token", result, expected


def products(rank: int, ranks: int, device: str, group: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, result, and expected result of matrix products with a collective inside."""
    generator = torch.Generator().manual_seed(7)
    given = torch.randint(-4, 5, (ranks, 2 * ranks, 6), generator=generator).half()
    weights = torch.randint(-4, 5, (ranks, 6, 3), generator=generator).half()
    x, weight = given[rank].to(device), weights[rank].to(device)
    total = torch.matmul(given, weights).sum(0)
    product, gathered = torch_npu.npu_all_gather_base_mm(x, weight, group, ranks)
    yield "all_gather_base_mm", product, given.flatten(0, 1) @ weights[rank]
    yield "all_gather_base_mm, gathered", gathered, given.flatten(0, 1)
    part = torch_npu.npu_mm_reduce_scatter_base(x, weight, group, ranks)
    yield "mm_reduce_scatter_base", part, total[2 * rank : 2 * rank + 2]
    yield "mm_all_reduce_base", torch_npu.npu_mm_all_reduce_base(x, weight, group), total


def captured(rank: int, ranks: int, device: str, group: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Capture messages between two ranks, a collective, a product with one inside, and experts in a graph."""
    tensor, incoming, there, back = of_rank(rank).to(device), torch.empty(6, device=device), rank + 1, rank - 1
    matrix, weight = torch.full((2, 6), 1.0 + rank).half().to(device), torch.ones(6, 3).half().to(device)
    x, ids = torch.full((4, 8), 1.0 + rank).half().to(device), (torch.arange(8).view(4, 2) % ranks).int().to(device)
    place, half = (group, ranks, rank, ranks), torch.full((4, 2), 0.5, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = tensor * 2
        messages = [
            dist.P2POp(dist.isend, doubled, there % ranks),
            dist.P2POp(dist.irecv, incoming, back % ranks),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        total = incoming + 1
        dist.all_reduce(total)
        product, _ = torch_npu.npu_all_gather_base_mm(matrix, weight, group, ranks)
        rows, _, origins, _, received, *_ = torch_npu.npu_moe_distribute_dispatch(x, ids, *place)
        combined = torch_npu.npu_moe_distribute_combine(rows * 2, ids, origins, received, half, *place)
    for shift in (0, 5):
        tensor.copy_(of_rank(rank) + shift)
        matrix.fill_(1 + rank + shift)
        x.fill_(1 + rank + shift)
        graph.replay()
        torch.npu.synchronize()
        yield f"captured messages {shift}", incoming, 2 * (of_rank(back % ranks) + shift)
        yield f"captured all_reduce {shift}", total, sum(2 * (of_rank(r) + shift) + 1 for r in range(ranks))
        expected = torch.cat([torch.full((2, 3), 6.0 * (1 + r + shift)) for r in range(ranks)]).half()
        yield f"captured product {shift}", product, expected
        yield f"captured experts {shift}", combined, torch.full((4, 8), 2.0 * (1 + rank + shift)).half()


def read_without_waiting(rank: int, ranks: int, device: str) -> dict[str, bool]:
    """Return whether a result is visible before and after somebody waits for it."""
    tensor, total = of_rank(rank).to(device), sum(of_rank(r) for r in range(ranks))
    torch.npu.synchronize()
    work = dist.all_reduce(tensor, async_op=True)
    before = tensor.cpu()
    work.wait()
    return {"before": torch.equal(before, total), "after": torch.equal(tensor.cpu(), total)}


def main() -> None:
    rank, ranks, store, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.npu.set_device(rank)
    dist.init_process_group(
        "hccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    answers = {"equal": {}}
    device = f"npu:{rank}"
    group = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    kernels = (expert_exchange(rank, ranks, device, group), products(rank, ranks, device, group))
    for name, computed, expected in chain(collectives(rank, ranks, device), *kernels):
        answers["equal"][name] = torch.equal(computed.cpu(), expected)
    answers["counts"] = meters.snapshot()["collectives"]
    for name, computed, expected in captured(rank, ranks, device, group):
        answers["equal"][name] = torch.equal(computed.cpu(), expected)
    answers["there"] = read_without_waiting(rank, ranks, device)
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
