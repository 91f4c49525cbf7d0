"""Checks on several ranks: collectives in captured graphs."""

import torch
import torch.distributed as dist

from npu_emulator import counters

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def every_collective(given: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """Return the result of each collective that a graph may hold, on `given` [size * size]."""
    summed, sent, kept = given + 1, given * 2, given.clone()
    dist.all_reduce(summed)
    dist.broadcast(sent, src=1)
    dist.reduce(kept, dst=0, op=dist.ReduceOp.MAX)
    gathered, listed = given.new_empty(size * given.numel()), [torch.empty_like(given) for _ in range(size)]
    dist.all_gather_into_tensor(gathered, sent)
    dist.all_gather(listed, summed)
    part, part_of_list = given.new_empty(given.numel()), torch.empty_like(given)
    dist.reduce_scatter_tensor(part, gathered, op=dist.ReduceOp.AVG)
    dist.reduce_scatter(part_of_list, listed)
    # Rank r sends r + 1 rows to each rank.
    rows, received = given.view(size, size), given.new_empty(sum(range(1, size + 1)), size)
    dist.all_to_all_single(
        received, rows[:1].expand((rank + 1) * size, size).contiguous(), list(range(1, size + 1)), [rank + 1] * size
    )
    exchanged = [torch.empty_like(row) for row in rows]
    dist.all_to_all(exchanged, [row.contiguous() for row in rows])
    return [summed, sent, kept, gathered, part, part_of_list, received.exp(), *exchanged]


@check
def captured_collectives_take_part_at_every_replay(ranks):
    given, graph = ranks.own((ranks.size**2,), seed=1), torch.npu.NPUGraph()
    torch.npu.synchronize()
    before = counters.collectives()
    with torch.npu.graph(graph):
        made = every_collective(given, ranks.rank, ranks.size)
    assert counters.collectives() == before, "a capture exchanged something"
    for seed in (2, 3):
        given.copy_(ranks.of(ranks.rank, given.shape, seed=seed))
        graph.replay()
        found = [tensor.clone() for tensor in made]
        for tensor, expected in zip(found, every_collective(given, ranks.rank, ranks.size), strict=True):
            assert torch.equal(tensor, expected), seed
    given.zero_()
    graph.replay()
    assert not torch.equal(made[0], found[0]), "replays give the same whatever the input"


@check
def a_barrier_makes_a_capture_invalid(ranks):
    graph, given = torch.npu.NPUGraph(), ranks.own((3,))
    try:
        with torch.npu.graph(graph):
            given.add_(1)
            dist.barrier()  # waits for the device
    except RuntimeError as error:
        assert "aclrtSynchronizeDevice of a device with a stream that is being captured" in str(error), error
    else:
        raise AssertionError("a capture held a barrier")
    dist.barrier()
