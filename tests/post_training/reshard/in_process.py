"""All ranks of an exchange in one process: the real planner, cutting, packing and scattering, with memory copies in
place of the collective. It allows rank counts that no test machine can start as processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from post_training.layouts.layout import PADDING
from post_training.reshard.exchange import Side, pack, scatter
from post_training.reshard.overlaps import Layouts
from post_training.reshard.plan import ReshardPlan, Transfers, make_plan
from post_training.reshard.resharder import copy_local, local_copies
from post_training.reshard.schedule import Bucket, bucket_count, schedule, shard_origins
from tests.post_training.layouts.reference import State


@dataclass
class Outcome:
    plan: ReshardPlan
    buckets: list[list[Bucket]]


def reshard_in_process(
    sources: Sequence[State],
    targets: Sequence[State],
    train: Layouts,
    rollout: Layouts,
    bucket_bytes: int,
    node_of: Sequence[int] | None = None,
) -> Outcome:
    """Fill `targets` (one state per rank) from `sources`; all tensors have one type."""
    kind = next(iter(sources[0].values())).dtype
    plan = make_plan(train, rollout, lambda name: kind.itemsize, node_of)
    types = dict.fromkeys(plan.names, kind)
    world = range(plan.world_size)
    source = [Side(sources[rank], train[rank], types) for rank in world]
    target = [Side(targets[rank], rollout[rank], types) for rank in world]
    for rank in world:
        for shard in rollout[rank]:
            if shard.hf_name == PADDING:
                shard.locate(targets[rank]).zero_()
        copy_local(local_copies(plan, rank, train[rank], rollout[rank]), source[rank], target[rank])
    buckets = run_leg(plan.remote, source, target, bucket_bytes)
    relayed = run_leg(plan.relay, target, target, bucket_bytes)
    return Outcome(plan, [first + second for first, second in zip(buckets, relayed, strict=True)])


def run_leg(
    transfers: Transfers, source: Sequence[Side], target: Sequence[Side], bucket_bytes: int
) -> list[list[Bucket]]:
    """Run one leg of a plan on all ranks and return the buckets of each."""
    world = range(len(source))
    count = bucket_count(transfers, len(source), bucket_bytes)
    buckets = [
        schedule(
            transfers,
            len(source),
            rank,
            count,
            (shard_origins(source[rank].shards), shard_origins(target[rank].shards)),
        )
        for rank in world
    ]
    for number in range(count):
        sent = []
        for rank in world:
            buffer = torch.empty(buckets[rank][number].send.size, dtype=torch.uint8)
            pack(source[rank], buckets[rank][number].send, buffer)
            sent.append(buffer.split(buckets[rank][number].send.splits))
        for rank in world:
            step = buckets[rank][number].receive
            parts = [sent[peer][rank] for peer in world]
            assert tuple(len(part) for part in parts) == step.splits
            scatter(target[rank], step, torch.cat(parts))
    return buckets
