"""Runs on each of several ranks: every collective of hccl on random sizes, against the CPU's results.

`main(folder)` writes ``rank<r>.json``: check -> "" or the fault.
"""

import contextlib
import datetime
import gc
import json
import os
import random
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu

from npu_emulator import counters, engine, meters
from tests.npu_emulator import collective_matmul_checks, expert_exchange_checks, graph_checks

CHECKS = [*expert_exchange_checks.CHECKS, *collective_matmul_checks.CHECKS, *graph_checks.CHECKS]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
]
DTYPES += [torch.int8, torch.bool]
SUMMED = [dtype for dtype in DTYPES if dtype != torch.float64]
NO_PRODUCTS = (torch.int16, torch.bfloat16)
ROUNDS = int(os.environ.get("COLLECTIVES_ROUNDS", 6))  # of random sizes
REDUCTIONS = {
    dist.ReduceOp.SUM: lambda parts: torch.stack(parts).sum(0),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
    dist.ReduceOp.PRODUCT: lambda parts: torch.stack(parts).prod(0),
}


def check(function):
    CHECKS.append(function)
    return function


class Ranks:
    """This rank, the number of ranks, and tensors that every rank can compute for every rank."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.device = rank, size, torch.device("npu", rank)

    def of(self, rank: int, shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randint(0, 3, shape, generator=generator).to(dtype)

    def own(self, shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
        return self.of(self.rank, shape, dtype, seed).to(self.device)

    def all(self, shape, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
        return [self.of(rank, shape, dtype, seed) for rank in range(self.size)]


def shapes(seed: int):
    """Shapes and dtypes that are the same on every rank."""
    choice = random.Random(seed)
    for number in range(ROUNDS):
        rows, columns = choice.choice([0, 1, 2, 3, 7]), choice.choice([1, 2, 5])
        yield number, (rows, columns), choice.choice(DTYPES)


def equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    expected = expected.to(got.dtype)
    assert got.device.type == "npu" and torch.equal(got.cpu(), expected), f"{got.cpu().tolist()} != {expected.tolist()}"


@check
def all_reduce_every_type_and_reduction(ranks):
    for dtype in SUMMED:
        for op, reference in REDUCTIONS.items():
            if op == dist.ReduceOp.PRODUCT and dtype in NO_PRODUCTS:
                continue
            if dtype == torch.bool:
                reference = {"SUM": torch.any, "MAX": torch.any}.get(op.name, torch.all)
                expected = reference(torch.stack(ranks.all((3, 4), dtype)), 0)
            else:
                expected = reference([part.double() for part in ranks.all((3, 4), dtype)])
            tensor = ranks.own((3, 4), dtype)
            dist.all_reduce(tensor, op)
            equal(tensor, expected)
    tensor = ranks.own((5,))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    equal(tensor, torch.stack(ranks.all((5,))).mean(0))


@check
def sums_of_16_bits_are_rounded_once(ranks):
    """The last ranks each add less than the sum can show, but together they add more."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        given = [torch.full((3,), 1.0 if rank else large, dtype=dtype) for rank in range(ranks.size)]
        assert torch.equal(given[0] + given[1], given[0]), "of two ranks the sum is the first one's"
        expected = torch.full((3,), large + ranks.size - 1).to(dtype)
        tensor = given[ranks.rank].to(ranks.device)
        dist.all_reduce(tensor)
        equal(tensor, expected)
        assert not torch.equal(expected, given[0])


@check
def broadcast_and_reduce(ranks):
    for number, shape, dtype in shapes(1):
        source = number % ranks.size
        tensor = ranks.own(shape, dtype, number)
        dist.broadcast(tensor, source)
        equal(tensor, ranks.of(source, shape, dtype, number))
        tensor = ranks.own(shape, torch.float32, number)
        dist.reduce(tensor, source)
        expected = torch.stack(ranks.all(shape, torch.float32, number)).sum(0)
        equal(tensor, expected if ranks.rank == source else ranks.of(ranks.rank, shape, torch.float32, number))


@check
def all_gather_even_and_uneven(ranks):
    for number, shape, dtype in shapes(2):
        expected = ranks.all(shape, dtype, number)
        gathered = [torch.empty(shape, dtype=dtype, device=ranks.device) for _ in expected]
        dist.all_gather(gathered, ranks.own(shape, dtype, number))
        for got, part in zip(gathered, expected, strict=True):
            equal(got, part)
        whole = torch.empty((shape[0] * ranks.size, shape[1]), dtype=dtype, device=ranks.device)
        dist.all_gather_into_tensor(whole, ranks.own(shape, dtype, number))
        equal(whole, torch.cat(expected))
        uneven = [ranks.of(rank, (rank + number, 2), dtype) for rank in range(ranks.size)]
        gathered = [torch.empty_like(part, device=ranks.device) for part in uneven]
        dist.all_gather(gathered, uneven[ranks.rank].to(ranks.device))
        for got, part in zip(gathered, uneven, strict=True):
            equal(got, part)


@check
def gather_and_scatter(ranks):
    for number, shape, dtype in shapes(3):
        root = number % ranks.size
        outputs = [torch.empty(shape, dtype=dtype, device=ranks.device) for _ in range(ranks.size)]
        dist.gather(ranks.own(shape, dtype, number), outputs if ranks.rank == root else None, root)
        if ranks.rank == root:
            for got, part in zip(outputs, ranks.all(shape, dtype, number), strict=True):
                equal(got, part)
        parts = [part.to(ranks.device) for part in ranks.all(shape, dtype, number)]
        dist.scatter(outputs[0], parts if ranks.rank == root else None, root)
        equal(outputs[0], ranks.of(ranks.rank, shape, dtype, number))


@check
def reduce_scatter_even_and_uneven(ranks):
    for number, (rows, columns), _ in shapes(4):
        for dtype, op in ((torch.float32, dist.ReduceOp.SUM), (torch.bfloat16, dist.ReduceOp.MAX)):
            shape = (rows * ranks.size, columns)
            expected = REDUCTIONS[op](ranks.all(shape, dtype, number)).chunk(ranks.size) if rows else None
            out = torch.empty((rows, columns), dtype=dtype, device=ranks.device)
            dist.reduce_scatter_tensor(out, ranks.own(shape, dtype, number), op)
            equal(out, expected[ranks.rank] if rows else out.cpu())
        sizes = [rank + 1 for rank in range(ranks.size)]
        total = torch.stack(ranks.all((sum(sizes), 2), torch.float32, number)).sum(0).split(sizes)
        out = torch.empty(sizes[ranks.rank], 2, device=ranks.device)
        dist.reduce_scatter(out, list(ranks.own((sum(sizes), 2), torch.float32, number).split(sizes)))
        equal(out, total[ranks.rank])
    out = torch.empty(2, device=ranks.device)
    dist.reduce_scatter_tensor(out, ranks.own((2 * ranks.size,)), dist.ReduceOp.AVG)
    equal(out, torch.stack(ranks.all((2 * ranks.size,))).mean(0).chunk(ranks.size)[ranks.rank])


@check
def uneven_tensors_of_torch_npu(ranks):
    """torch_npu's functions keep uneven parts in one tensor, and so call another function of HCCL than lists do."""
    for number in range(ROUNDS):
        rows = random_splits(200 + number, ranks.size)[0]
        rows[number % ranks.size] = 3  # some part has something
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            out = torch.full((rows[ranks.rank], 2), -1.0, device=ranks.device)
            given = ranks.own((sum(rows), 2), torch.float32, number)
            torch_npu.distributed.reduce_scatter_tensor_uneven(out, given, rows, op)
            equal(out, REDUCTIONS[op](ranks.all((sum(rows), 2), torch.float32, number)).split(rows)[ranks.rank])
        gathered = torch.full((sum(rows), 2), -1.0, device=ranks.device)
        parts = [ranks.of(rank, (rows[rank], 2), torch.float32, number) for rank in range(ranks.size)]
        own = parts[ranks.rank].to(ranks.device)
        torch_npu.distributed.all_gather_into_tensor_uneven(gathered, own, rows)
        equal(gathered, torch.cat(parts))


def random_splits(seed: int, size: int) -> list[list[int]]:
    """Rows from each rank to each rank, some of them none."""
    choice = random.Random(seed)
    return [[choice.choice([0, 0, 1, 2, 5]) for _ in range(size)] for _ in range(size)]


@check
def all_to_all_single_uneven(ranks):
    for number in range(3 * ROUNDS):
        splits, dtype = random_splits(number, ranks.size), DTYPES[number % len(DTYPES)]
        inputs = [ranks.of(rank, (sum(splits[rank]), 3), dtype, number) for rank in range(ranks.size)]
        received = [splits[rank][ranks.rank] for rank in range(ranks.size)]
        out = torch.empty(sum(received), 3, dtype=dtype, device=ranks.device)
        dist.all_to_all_single(out, inputs[ranks.rank].to(ranks.device), received, splits[ranks.rank])
        equal(out, torch.cat([inputs[rank].split(splits[rank])[ranks.rank] for rank in range(ranks.size)]))


@check
def all_to_all_single_even(ranks):
    out = torch.empty(2 * ranks.size, device=ranks.device)
    dist.all_to_all_single(out, ranks.own((2 * ranks.size,)))
    equal(out, torch.cat([part.chunk(ranks.size)[ranks.rank] for part in ranks.all((2 * ranks.size,))]))


@check
def all_to_all_of_lists(ranks):
    for number in range(ROUNDS):
        splits = random_splits(100 + number, ranks.size)
        inputs = [ranks.of(rank, (sum(splits[rank]), 2), torch.bfloat16, number) for rank in range(ranks.size)]
        outputs = [
            torch.empty(splits[rank][ranks.rank], 2, dtype=torch.bfloat16, device=ranks.device)
            for rank in range(ranks.size)
        ]
        dist.all_to_all(outputs, [part.to(ranks.device) for part in inputs[ranks.rank].split(splits[ranks.rank])])
        for rank, out in enumerate(outputs):
            equal(out, inputs[rank].split(splits[rank])[ranks.rank])


@check
def point_to_point(ranks):
    following, preceding = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for dtype in DTYPES:
        received = torch.empty(3, 2, dtype=dtype, device=ranks.device)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, ranks.own((3, 2), dtype), following),
            dist.P2POp(dist.irecv, received, preceding),
        ])  # fmt: skip
        for work in works:
            work.wait()
        equal(received, ranks.of(preceding, (3, 2), dtype))
    if ranks.rank % 2 == 0:
        dist.send(ranks.own((4,)), following)
        dist.recv(received := torch.zeros(4, device=ranks.device), preceding)
    else:
        dist.recv(received := torch.zeros(4, device=ranks.device), preceding)
        dist.send(ranks.own((4,)), following)
    equal(received, ranks.of(preceding, (4,)))


@check
def messages_of_a_pair_keep_their_order(ranks):
    """There are so many that a receiver takes one while its sender still checks which of the others may go."""
    count, following, preceding = 200, (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    given = torch.arange(count, device=ranks.device) + 1000 * ranks.rank
    received = torch.full_like(given, -1)
    sends = [dist.P2POp(dist.isend, one, following) for one in given.split(1)]
    for work in dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, one, preceding) for one in received.split(1)]):
        work.wait()
    equal(received, torch.arange(count) + 1000 * preceding)


@check
def objects(ranks):
    gathered = [None] * ranks.size
    dist.all_gather_object(gathered, {"rank": ranks.rank, "text": "x" * ranks.rank})
    assert [entry["rank"] for entry in gathered] == list(range(ranks.size))
    shared = [{"a": 5}, "b"] if ranks.rank == 1 else [None, None]
    dist.broadcast_object_list(shared, 1)
    assert shared == [{"a": 5}, "b"]


@check
def subgroups_work_at_the_same_time(ranks):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[ranks.rank % 2]
    tensor = ranks.own((3,))
    dist.all_reduce(tensor, group=mine)
    equal(tensor, ranks.of(ranks.rank, (3,)) + ranks.of((ranks.rank + 2) % 4, (3,)))
    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    before = ranks.own((4,))
    outs = [torch.empty(4, device=ranks.device) for _ in range(8)]
    dist.all_reduce(outs[0].copy_(before), group=alone)
    dist.all_gather_into_tensor(outs[1], before, group=alone)
    dist.reduce_scatter_tensor(outs[2], before, group=alone)
    dist.all_to_all_single(outs[3], before, group=alone)
    dist.broadcast(outs[4].copy_(before), ranks.rank, group=alone)
    dist.reduce(outs[5].copy_(before), ranks.rank, dist.ReduceOp.MAX, group=alone)
    dist.all_gather([outs[6]], before, group=alone)
    dist.scatter(outs[7], [before], ranks.rank, group=alone)
    dist.barrier(alone)
    for out in outs:
        equal(out, before.cpu())


@check
def asynchronous_works_complete_at_wait(ranks):
    tensors = [ranks.own((4,), seed=number) for number in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()  # has the stream wait
        torch.npu.synchronize()
        assert work.is_completed()
        equal(tensor, torch.stack(ranks.all((4,), seed=number)).sum(0))


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Make results of collectives appear only when something waits for them."""
    before = engine.library().npu_emulator_defer_collectives(1)
    try:
        yield
    finally:
        engine.library().npu_emulator_defer_collectives(before)


@check
def deferred_collectives_stay_late_behind_others(ranks):
    """A missing wait also shows if the same stream of HCCL gets more work, unless that work reads the result."""
    total = torch.stack(ranks.all((4,))).sum(0)
    with deferred():
        first, second = ranks.own((4,)), ranks.own((4,))
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
        torch.npu.current_stream().synchronize()
        equal(first, ranks.own((4,)).cpu())
        equal(second, ranks.own((4,)).cpu())
        works[0].wait()
        equal(first, total)
        works[1].wait()
        equal(second, total)
        gathered = torch.zeros(4 * ranks.size, device=ranks.device)
        works = [dist.all_reduce(second, async_op=True), dist.all_gather_into_tensor(gathered, second, async_op=True)]
        works[1].wait()
        equal(gathered, (total * ranks.size).repeat(ranks.size))


@check
def deferred_collectives_show_a_missing_wait(ranks):
    own, everything = ranks.own((4,)), torch.cat(ranks.all((4,)))
    given = everything.to(ranks.device)
    launches = [
        (lambda out: dist.all_gather_into_tensor(out, own, async_op=True), everything),
        (
            lambda out: dist.all_to_all_single(out, given, async_op=True),
            everything.chunk(ranks.size)[ranks.rank].repeat(ranks.size),
        ),
        (lambda out: dist.all_reduce(out, async_op=True), torch.full((4 * ranks.size,), -float(ranks.size))),
    ]

    def launched(launch) -> tuple[torch.Tensor, dist.Work]:
        out = torch.full((4 * ranks.size,), -1.0, device=ranks.device)
        return out, launch(out)

    with deferred():
        for launch, expected in launches:
            for finish in (lambda work: work.wait(), lambda work: torch.npu.synchronize()):
                out, work = launched(launch)
                torch.npu.current_stream().synchronize()  # HCCL's stream is another
                assert (out == -1).all(), "visible without a wait"
                finish(work)
                equal(out, expected)
        waited, total = ranks.own((4,)), torch.stack(ranks.all((4,))).sum(0)
        dist.all_reduce(waited)
        equal(waited, total)
        twice = ranks.own((4,))
        dist.all_reduce(twice, async_op=True)
        dist.all_reduce(twice, async_op=True).wait()  # the stream of both keeps their order without a wait
        equal(twice, total * ranks.size)
    for launch, expected in launches:
        equal(launched(launch)[0], expected)  # the control: nothing is deferred, and nothing waited for


@check
def wait_brings_only_earlier_results(ranks):
    """A program that waits for the first of two collectives on one stream reads old values of the second."""
    own, total = ranks.own((4,)).cpu(), torch.stack(ranks.all((4,))).sum(0)
    with deferred():
        first, second = own.to(ranks.device), own.to(ranks.device)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
        works[0].wait()
        equal(first, total)
        equal(second, own)
        works[1].wait()
        equal(second, total)


@check
def inference_tensors_are_accepted(ranks):
    with torch.inference_mode():
        tensor = ranks.own((3,)) * 1
        dist.all_reduce(tensor)
        equal(tensor, torch.stack(ranks.all((3,))).sum(0))


@check
def functional_collectives_and_dtensor(ranks):
    import torch.distributed._functional_collectives as functional
    from torch.distributed._tensor import Shard, distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh

    gathered = functional.all_gather_tensor(ranks.own((1,)), 0, dist.group.WORLD)
    equal(functional.wait_tensor(gathered), torch.cat(ranks.all((1,))))
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("data", "tensor"))
    sharded = distribute_tensor(torch.arange(8.0, device=ranks.device), mesh["tensor"], [Shard(0)])
    assert sharded.to_local().numel() == 4
    equal(sharded.full_tensor(), torch.arange(8.0))


@check
def data_parallel_gradients_are_averaged(ranks):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(ranks.device)
    inputs = ranks.all((3, 4))
    expected = torch.stack(
        [torch.autograd.grad(model(part.to(ranks.device)).sum(), model.weight)[0] for part in inputs]
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[ranks.rank])
    wrapped(ranks.own((3, 4))).sum().backward()
    assert torch.allclose(model.weight.grad, expected.mean(0))


@check
def fully_sharded_training_equals_plain_training(ranks):
    from torch.distributed.fsdp import FullyShardedDataParallel

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(ranks.device)

    plain, sharded = build(), FullyShardedDataParallel(build(), device_id=ranks.rank)
    batch = torch.cat(ranks.all((2, 8))).to(ranks.device)
    for model, inputs in ((plain, batch), (sharded, ranks.own((2, 8)))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(sharded):
        for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


MODULUS = 1009
CHAIN_STEPS = 40 * ROUNDS // 6


def chain_actions(ranks) -> dict:
    """Return by name the actions of this rank on its tensor.

    The tensors have as many rows as there are ranks, or a multiple of it, and hold whole numbers.
    """
    size = ranks.size
    following, preceding = (ranks.rank + 1) % size, (ranks.rank - 1) % size

    def in_place(act):
        def run(own):
            act(own)
            return own

        return run

    def gather_and_keep(own):
        whole = own.new_empty(size * own.shape[0], own.shape[1])
        dist.all_gather_into_tensor(whole, own)
        return whole[::size].contiguous()

    def scatter_and_repeat(own):
        part = own.new_empty(own.shape[0] // size, own.shape[1])
        dist.reduce_scatter_tensor(part, own)
        return part.repeat(size, 1)

    def exchange(own):
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own)
        return received

    def hand_on(own):
        received = torch.empty_like(own)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own, following), dist.P2POp(dist.irecv, received, preceding)]
        ):
            work.wait()
        return received

    def gather_and_scatter(own):
        gathered = [torch.empty_like(own) for _ in range(size)] if ranks.rank == 1 else None
        dist.gather(own, gathered, 1)
        received = torch.empty_like(own)
        dist.scatter(received, gathered[::-1] if gathered else None, 1)
        return received

    def reduce_to_last(own):
        dist.reduce(own, size - 1)
        return own

    return {
        "all_reduce": in_place(dist.all_reduce),
        "maximum": in_place(lambda own: dist.all_reduce(own, dist.ReduceOp.MAX)),
        "broadcast": in_place(lambda own: dist.broadcast(own, 2)),
        "reduce": reduce_to_last,
        "all_gather": gather_and_keep,
        "reduce_scatter": scatter_and_repeat,
        "all_to_all": exchange,
        "send and receive": hand_on,
        "gather and scatter": gather_and_scatter,
    }


def chain_references(size: int) -> dict:
    """Return by name the results of the same actions on the tensors of all ranks on the CPU."""

    def every_rank_gets(make):
        return lambda parts: [make(parts) for _ in parts]

    def total(parts):
        return torch.stack(parts).sum(0)

    return {
        "all_reduce": every_rank_gets(total),
        "maximum": every_rank_gets(lambda parts: torch.stack(parts).amax(0)),
        "broadcast": every_rank_gets(lambda parts: parts[2]),
        "reduce": lambda parts: [*parts[:-1], total(parts)],
        "all_gather": every_rank_gets(lambda parts: torch.cat(parts)[::size]),
        "reduce_scatter": lambda parts: [part.repeat(size, 1) for part in total(parts).chunk(size)],
        "all_to_all": lambda parts: [torch.cat([part.chunk(size)[rank] for part in parts]) for rank in range(size)],
        "send and receive": lambda parts: [parts[rank - 1] for rank in range(size)],
        "gather and scatter": lambda parts: parts[::-1],
    }


@check
def a_chain_of_every_collective_equals_the_same_chain_on_the_cpu(ranks):
    """Each takes the result of the one before, so that an error anywhere shows at the end."""
    choice = random.Random(5)
    actions, references = chain_actions(ranks), chain_references(ranks.size)
    for columns in (1, 3, 17):
        parts = ranks.all((2 * ranks.size, columns), torch.int64, columns)
        own = parts[ranks.rank].to(ranks.device)
        order = [*actions, *choice.choices(list(actions), k=CHAIN_STEPS)]
        choice.shuffle(order)
        for number, name in enumerate(order):
            own, parts = actions[name](own), references[name](parts)
            # Keeps numbers small, and ranks different after a collective that makes them equal.
            own = (own * 3 + ranks.rank + torch.arange(columns, device=ranks.device)) % MODULUS
            parts = [(part * 3 + rank + torch.arange(columns)) % MODULUS for rank, part in enumerate(parts)]
            assert torch.equal(own.cpu(), parts[ranks.rank]), f"after {order[: number + 1]}"


@check
def tensor_parallel_layers_of_dtensor_equal_plain_ones(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).to(ranks.device)

    plain = build()
    mesh = init_device_mesh("npu", (ranks.size,))
    parallel = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert parallel[0].weight.to_local().shape == (16 // ranks.size, 8)
    inputs = ranks.of(0, (5, 8)).to(ranks.device)
    results = []
    for model in (plain, parallel):
        x = inputs.clone().requires_grad_()
        result = model(x)
        result.square().sum().backward()
        results.append((result, x.grad, model[0].weight.grad, model[2].weight.grad))
    for index, (expected, got) in enumerate(zip(*results, strict=True)):
        got = got.full_tensor() if index >= 2 else got
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4), index


@check
def collectives_are_counted_with_bytes_and_group_size(ranks):
    following, preceding = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

    def exchange(own, received):
        messages = [dist.P2POp(dist.isend, own, following), dist.P2POp(dist.irecv, received, preceding)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def counted(kind, size=ranks.size):
        totals = meters.snapshot()["collectives"].get(kind, {}).get(str(size), {"count": 0, "bytes": 0})
        return totals["count"], totals["bytes"]

    actions = {
        "all_reduce": (lambda: dist.all_reduce(ranks.own((5,))), 20),
        "all_gather": (lambda: dist.all_gather_into_tensor(torch.empty(20, device=ranks.device), ranks.own((5,))), 20),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(torch.empty(2, device=ranks.device), ranks.own((8,))),
            32,
        ),
        "all_to_all": (lambda: dist.all_to_all_single(torch.empty(8, device=ranks.device), ranks.own((8,))), 32),
        "broadcast": (
            lambda: dist.broadcast(ranks.own((5,), torch.bfloat16), 0),
            10 if ranks.rank == 0 else 0,
        ),
        "send": (lambda: exchange(ranks.own((5,)), torch.empty(5, device=ranks.device)), 20),
        "recv": (lambda: exchange(ranks.own((5,)), torch.empty(5, device=ranks.device)), 20),
        "reduce": (lambda: dist.reduce(ranks.own((5,)), 0), 20),
    }
    for kind, (action, size) in actions.items():
        torch.npu.synchronize()
        count, total = counted(kind)
        action()
        torch.npu.synchronize()
        assert counted(kind) == (count + 1, total + size), kind
    count, total = counted("all_reduce")
    dist.barrier()  # the process group makes it of a sum
    assert counted("all_reduce")[0] == count + 1


@check
def running_out_of_memory_in_a_collective_is_an_error_not_a_crash(ranks):
    """A hundred times each: HCCL gets no memory for its lists, nothing leaks, and the group keeps working."""
    capacity = counters.memory_statistics(ranks.rank)["capacity"]
    elements = 1 << 20  # not so few that the allocator keeps them together with others
    tensor = torch.ones(elements, device=ranks.device)
    parts = [torch.empty(elements, device=ranks.device) for _ in range(ranks.size)]
    actions = {
        "all_gather": lambda: dist.all_gather(parts, tensor),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, parts),
        "all_to_all": lambda: dist.all_to_all(parts, parts),
    }
    gc.collect()  # the checks before this one left models behind
    for name, action in actions.items():
        action()
        torch.npu.synchronize()
        torch.npu.empty_cache()
        allocated = torch.npu.memory_allocated()
        torch.npu.set_per_process_memory_fraction(torch.npu.memory_reserved() / capacity)
        refused = 0
        try:
            for _ in range(100):
                try:
                    action()
                except RuntimeError as error:
                    refused += "NPU out of memory" in str(error)
        finally:
            torch.npu.set_per_process_memory_fraction(1.0)
        assert refused == 100, f"{name}: memory ran out {refused} times of 100"
        assert torch.npu.memory_allocated() == allocated, name
        dist.barrier()
        action()  # the control: it is the memory
    own = ranks.own((3,))
    dist.all_reduce(own)
    equal(own, torch.stack(ranks.all((3,))).sum(0))


@check
def a_false_expectation_is_noticed(ranks):
    tensor = ranks.own((4,))
    dist.all_reduce(tensor)
    try:
        equal(tensor, ranks.of(ranks.rank, (4,)) + 100)
    except AssertionError:
        return
    raise AssertionError("the comparison accepts anything")


def run(checks: list, folder: Path) -> None:
    """Run the checks on this rank and write their results."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=60))
    assert dist.get_backend() == "hccl"
    found = {}
    for function in checks:
        try:
            function(Ranks(rank, size))
            torch.npu.synchronize()
            found[function.__name__] = ""
        except Exception:
            found[function.__name__] = traceback.format_exc()
            break  # the ranks may be out of step now
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if not any(found.values()):
        dist.destroy_process_group()


def main(folder: Path) -> None:
    run(CHECKS, folder)
