"""One process group of ranks of several worlds: verl's trainers have a world, and so has each rollout replica."""

from __future__ import annotations

import datetime

import torch.distributed as dist

BACKEND = "cpu:gloo,npu:hccl"


def join(store: dist.Store, rank: int, size: int, name: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Enter the group. All its ranks must, and each has a world of its own already.

    torch makes groups out of the ranks of one world only. So this one is made as torch makes a world, and registered
    with numbers under which torch's functions find this rank: those of its own world, counted on in both directions.

    Args:
        store: common to all ranks of the group.
        rank: in the group.
        size: of the group.
        name: the same on all ranks, and new in each process.
        timeout: of a collective.
    """
    own = dist.PrefixStore(name, store)
    group, _ = dist.distributed_c10d._new_process_group_helper(
        size, rank, [], BACKEND, own, group_name=name, timeout=timeout, group_desc="alltoallv"
    )
    first = dist.get_rank() - rank
    dist.distributed_c10d._world.pg_group_ranks[group] = {first + place: place for place in range(size)}
    return group


def leave(group: dist.ProcessGroup) -> None:
    """Give the group up."""
    dist.destroy_process_group(group)
