"""Runs on each of several ranks: calls that the process group and HCCL reject. No rank sends anything, and all go on.

`main(folder)` writes ``rank<r>.json`` as `collectives_program` does. With TASK_QUEUE_ENABLE=0 a rejection by HCCL is
raised at its call; torch_npu's queue would do no more work after one.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from npu_emulator import counters
from tests.npu_emulator import collective_matmul_checks, expert_exchange_checks
from tests.npu_emulator.collectives_program import NO_PRODUCTS, Ranks, equal, run
from tests.npu_emulator.expert_exchange_checks import raises

# torch_npu 2.5.1 misspells a word.
WRONG_SIZES = f"Split sizes {'dosen' if torch.__version__ < (2, 6) else 'doesn'}'t match total dim 0 size"
CHECKS = [*expert_exchange_checks.REFUSALS, *collective_matmul_checks.REFUSALS]


def check(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    """Add a check that rejected calls send nothing, and that collectives still work."""

    @functools.wraps(function)
    def checked(ranks: Ranks) -> None:
        before = counters.collectives()
        function(ranks)
        assert counters.collectives() == before, "something was sent"
        own = ranks.own((3,))
        dist.all_reduce(own)
        equal(own, torch.stack(ranks.all((3,))).sum(0))
        assert counters.collectives() != before

    CHECKS.append(checked)
    return checked


@check
def tensors_with_gaps(ranks):
    gaps = ranks.own((6, 4))[::2, 1]
    raises("Tensors must be contiguous", dist.all_reduce, gaps)
    raises("Tensors must be contiguous", dist.broadcast, gaps, 0)
    raises("Tensors must be contiguous", dist.irecv, gaps, (ranks.rank + 1) % ranks.size)


@check
def sums_of_types_that_hccl_does_not_add(ranks):
    for dtype, name in ((torch.float64, "at::kDouble"), (torch.uint8, "at::kByte/at::kBool")):
        tensor, refused = ranks.own((ranks.size,), dtype), f"Unsupported data type {name}"
        raises(refused, dist.reduce_scatter_tensor, tensor[:1], tensor)
        raises(refused, dist.reduce_scatter, tensor[:1], list(tensor.split(1)))
        if dtype == torch.float64:  # the process group adds bytes as int32
            raises(refused, dist.all_reduce, tensor)
            raises(refused, dist.reduce, tensor, 0)
        equal(tensor, ranks.of(ranks.rank, (ranks.size,), dtype))


@check
def products_of_types_that_hccl_does_not_multiply(ranks):
    op, refused = dist.ReduceOp.PRODUCT, "products of int16 and bfloat16 are not supported"
    for dtype in NO_PRODUCTS:
        tensor = ranks.own((ranks.size,), dtype)
        raises(refused, dist.all_reduce, tensor, op)
        raises(refused, dist.reduce, tensor, 0, op)
        raises(refused, dist.reduce_scatter_tensor, tensor[:1], tensor, op)
        raises(refused, dist.reduce_scatter, tensor[:1], list(tensor.split(1)), op)
        equal(tensor, ranks.of(ranks.rank, (ranks.size,), dtype))


@check
def other_reductions(ranks):
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        raises(f"Cannot use ReduceOp.{op.name} with HCCL", dist.all_reduce, ranks.own((3,)), op)


@check
def wrong_splits(ranks):
    even = [1] * ranks.size
    cases = {
        WRONG_SIZES: (4, 3, even, even),
        "Number of tensor splits not equal to group size": (4, 4, even[1:], even),
        "Tensors are not equal in size or data type": (3, 4, None, None),
        "Tensor's dim 0 does not divide equally across group size": (3, 3, None, None),
    }
    for text, (out_rows, in_rows, *splits) in cases.items():
        out, given = torch.empty(out_rows, device=ranks.device), torch.empty(in_rows, device=ranks.device)
        raises(text, dist.all_to_all_single, out, given, *splits)


@check
def arguments_that_differ(ranks):
    """Every rank gets the code of HCCL's own check; the next collective is in step."""
    odd, three, total, largest = ranks.rank == 2, ranks.own((3,)), dist.ReduceOp.SUM, dist.ReduceOp.MAX
    whole = torch.empty(3 * ranks.size, device=ranks.device)
    usual = (dist.all_reduce, three, total)
    for call, function, *arguments in (
        ("HcclAllReduce(4 x Float, sum)", dist.all_reduce, ranks.own((4,)), total),
        ("HcclAllReduce(3 x Int, sum)", dist.all_reduce, three.int(), total),
        ("HcclAllReduce(3 x Float, max)", dist.all_reduce, three, largest),
        ("HcclReduce(3 x Float, sum, root 0)", dist.reduce, three, 0),
        ("HcclAllGather(3 x Float)", dist.all_gather_into_tensor, whole, three),
    ):
        if odd:
            raises(f"rank 2 calls {call}, rank 0 HcclAllReduce(3 x Float, sum)", function, *arguments)
        else:
            raises(f", rank 2 {call}", *usual)
    raises(f"root {3 if odd else 1})", dist.broadcast, three, 3 if odd else 1)


@check
def uneven_parts_that_differ(ranks):
    """Lists with the same sum, and a part of another length than its own in the list, on one rank and on all."""
    odd, rows = ranks.rank == 2, [3, 1, 2, *[1] * (ranks.size - 3)]
    given = [1, 3, *rows[2:]] if odd else rows
    gathered, total = torch.empty(sum(rows), device=ranks.device), ranks.own((sum(rows),))
    gather, scatter = (
        torch_npu.distributed.all_gather_into_tensor_uneven,
        torch_npu.distributed.reduce_scatter_tensor_uneven,
    )
    own, out = ranks.own((given[ranks.rank],)), torch.empty(given[ranks.rank], device=ranks.device)
    raises("HcclAllGatherV(7 x Float, counts 1 3 2 1 at 0 1 4 6)", gather, gathered, own, given)
    raises("HcclReduceScatterV(7 x Float, sum, counts 1 3 2 1 at 0 1 4 6)", scatter, out, total, given)
    for is_wrong, text in ((odd, "rank 2 passes 3"), (True, f"rank {ranks.rank} passes {rows[ranks.rank] + 1}")):
        raises(text, gather, gathered, ranks.own((rows[ranks.rank] + is_wrong,)), rows)


@check
def messages_to_oneself(ranks):
    raises("should not be the same as the rank of the current process", dist.send, ranks.own((3,)), ranks.rank)


def an_accepted_call_is_noticed(ranks):
    try:
        raises("Tensors must be contiguous", dist.all_reduce, ranks.own((3,)))
    except AssertionError:
        return
    raise AssertionError("what is accepted counts as refused")


CHECKS.append(an_accepted_call_is_noticed)


def main(folder: Path) -> None:
    run(CHECKS, folder)
