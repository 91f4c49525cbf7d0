"""A process group over several worlds: verl's trainers are one world, and each rollout replica is another.

vLLM-Ascend's communicator for this has no uneven all-to-all: docs/upstream/vllm-ascend-pyhccl-collectives.md.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist

BACKEND = "cpu:gloo,npu:hccl"


def join(store: dist.Store, rank: int, size: int, name: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Join the group. Collective over its ranks, each of which is in a world already.

    torch only makes groups from ranks of one world. So this one is made as torch makes a world, and registered with
    numbers under which torch's functions find this rank: those of its own world, continued in both directions.

    Args:
        store: common to all ranks of the group.
        rank: this process's rank in the group.
        size: number of ranks in the group.
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
    """Destroy this rank's part of the group."""
    dist.destroy_process_group(group)
