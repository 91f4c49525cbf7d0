"""Compute the cost of a reshard from the layouts alone, without weights or a process group.

The plan is compared with the lower bound, and with the per-tensor algorithm that the recipe's authors published.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from post_training.layouts.layout import EXPERT_MARK, PADDING, RolloutPlacement, Shard, Slice, Table, TrainPlacement
from post_training.reshard.plan import ReshardPlan, make_plan
from post_training.reshard.schedule import bucket_count, schedule, shard_origins


@dataclass(frozen=True)
class Spread:
    """Minimum, mean and maximum over ranks (or nodes)."""

    minimum: float
    average: float
    maximum: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        return cls(float(values.min()), float(values.mean()), float(values.max()))


@dataclass(frozen=True)
class PlanStatistics:
    """Costs of one reshard; bytes are per rank unless named by node.

    Attributes:
        bound_received, bound_expert_received: bytes that a rank needs and does not hold itself.
        node_ingress: bytes that cross into a node.
        collectives: of one reshard with a cached plan: one per bucket, and one in which all ranks agree on success.
        object_collectives: those that carry Python objects instead of weights.
        staging_peak: of the rank with most traffic.
        regions: received ones.
        plan_seconds: CPU seconds of one rank for the layouts of all ranks and the plan.
    """

    ranks: int
    received: Spread
    sent: Spread
    bound_received: Spread
    expert_received: Spread
    bound_expert_received: Spread
    node_ingress: Spread
    buckets: int
    collectives: int
    object_collectives: int
    staging_peak: int
    bucket_bytes: int
    regions: Spread
    plan_seconds: float

    @property
    def received_over_bound(self) -> float:
        return self.received.average / max(self.bound_received.average, 1.0)

    @property
    def sent_maximum_over_average(self) -> float:
        return self.sent.maximum / max(self.sent.average, 1.0)


@dataclass(frozen=True)
class PerTensorStatistics:
    """Costs of the published algorithm on the same layouts; bytes are per rank.

    Attributes:
        collectives: those of one rank: a pipeline broadcast for each training tensor, a gather for each tensor of a
            stage that is cut over tensor parallel ranks, and an all-to-all for each of the two expert tensors of a
            layer.
        object_collectives: calls that announce a tensor (its name; its shape and type), not the messages inside them.
    """

    received: Spread
    expert_received: Spread
    collectives: int
    object_collectives: int
    staging_peak: int


def plan_statistics(
    table: Table,
    train: TrainPlacement,
    rollout: RolloutPlacement,
    bucket_bytes: int,
    itemsize: int = 2,
    ranks_per_node: int = 16,
    relay: bool = False,
) -> tuple[PlanStatistics, ReshardPlan]:
    """Plan without running; with `relay`, regions enter a node once. Raises ValueError if the placements do not fit."""
    begin = time.process_time()
    ranks = range(train.world_size)
    held = [table.megatron(train, rank) for rank in ranks]
    needed = [table.vllm_ascend(rollout, rank) for rank in range(rollout.world_size)]
    nodes = np.arange(len(held)) // ranks_per_node
    plan = make_plan(held, needed, lambda name: itemsize, nodes.tolist() if relay else None)
    seconds = time.process_time() - begin
    legs = (plan.remote, plan.relay)
    traffic = np.add(*(leg.between(plan.world_size) for leg in legs))
    counts = [bucket_count(leg, plan.world_size, bucket_bytes) for leg in legs]
    busiest = int((traffic.sum(0) + traffic.sum(1)).argmax())
    limits = np.array([_missing_bytes(held[rank], needed[rank], itemsize) for rank in ranks])
    expert = np.array([EXPERT_MARK in name for name in plan.names])
    statistics = PlanStatistics(
        ranks=plan.world_size,
        received=Spread.of(traffic.sum(0)),
        sent=Spread.of(traffic.sum(1)),
        bound_received=Spread.of(limits.sum(1)),
        expert_received=Spread.of(
            np.add(*(np.bincount(leg.target, leg.bytes * expert[leg.name], plan.world_size) for leg in legs))
        ),
        bound_expert_received=Spread.of(limits[:, 1]),
        node_ingress=Spread.of(_node_ingress(traffic, nodes)),
        buckets=sum(counts),
        collectives=sum(counts) + 1,
        object_collectives=0,
        staging_peak=_staging_peak(plan, busiest, counts, held[busiest], needed[busiest]),
        bucket_bytes=bucket_bytes,
        regions=Spread.of(np.add(*(np.bincount(leg.target, minlength=plan.world_size) for leg in legs))),
        plan_seconds=seconds,
    )
    return statistics, plan


def _staging_peak(
    plan: ReshardPlan, rank: int, counts: Sequence[int], held: Sequence[Shard], needed: Sequence[Shard]
) -> int:
    source, target = shard_origins(held), shard_origins(needed)
    peak = 0
    for leg, count, origins in ((plan.remote, counts[0], source), (plan.relay, counts[1], target)):
        buckets = schedule(leg, plan.world_size, rank, count, (origins, target))
        sent, received = ([getattr(step, side).size for step in buckets] for side in ("send", "receive"))
        peak = max(peak, max(sent, default=0) + max(received, default=0))
    return peak


def _missing_bytes(held: Sequence[Shard], needed: Sequence[Shard], itemsize: int) -> tuple[int, int]:
    """Return the bytes of rollout shards that the rank does not hold in training: all but experts, and experts."""
    own: dict[str, list[Slice]] = {}
    for shard in held:
        own.setdefault(shard.hf_name, []).append(shard.bounds)
    missing = [0, 0]
    for shard in needed:
        if shard.hf_name != PADDING:
            size = _elements(shard.bounds) - sum(
                _overlap(shard.bounds, bounds) for bounds in own.get(shard.hf_name, ())
            )
            missing[EXPERT_MARK in shard.hf_name] += size * itemsize
    return missing[0], missing[1]


def _elements(bounds: Slice) -> int:
    count = 1
    for start, stop in bounds:
        count *= stop - start
    return count


def _overlap(left: Slice, right: Slice) -> int:
    edges = zip(left, right, strict=True)
    return _elements(tuple((0, max(min(a[1], b[1]) - max(a[0], b[0]), 0)) for a, b in edges))


def _node_ingress(traffic: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    count = int(nodes.max()) + 1
    into = np.array([[traffic[nodes == a][:, nodes == b].sum() for b in range(count)] for a in range(count)])
    return into.sum(0) - np.diag(into)


def per_tensor_statistics(
    table: Table, train: TrainPlacement, rollout: RolloutPlacement, itemsize: int = 2
) -> PerTensorStatistics:
    """Compute the costs of the published algorithm, as described in the recipe's technical report: tensor by tensor.

    A tensor that is cut over tensor parallel ranks is gathered inside its stage; every stage broadcasts its tensors to
    the others; experts are broadcast as they are stored and then sent inside the tensor-and-expert group to the ranks
    that serve them. As in verl, two object collectives announce each tensor. Raises ValueError unless experts are laid
    out by moe_tp_extend_ep, for which the algorithm was published.
    """
    if not train.moe_tp_extend_ep:
        raise ValueError("the published algorithm is described only for moe_tp_extend_ep")
    dense = {name: _size(dims, itemsize) for name, dims in table.shapes.items() if EXPERT_MARK not in name}
    routed = {name: _size(dims, itemsize) for name, dims in table.shapes.items() if EXPERT_MARK in name}
    expert_layers = {_layer(name) for name in routed}
    count = len({name.split(".")[5] for name in routed})
    expert = sum(routed.values()) // max(len(expert_layers) * count, 1)
    share = count // (train.tp * train.ep)
    received, experts = [], []
    for rank in range(train.world_size):
        held = sum(
            _elements(shard.bounds) * itemsize
            for shard in table.megatron(train, rank)
            if EXPERT_MARK not in shard.hf_name and shard.hf_name != PADDING
        )
        own_layers = sum(slot.layer in expert_layers for slot in train.layers(rank))
        first, last = rollout.experts(rank, count)
        column = train.tp_ep_rank(rank)
        in_column = max(min(last, (column + 1) * share) - max(first, column * share), 0)
        experts.append(
            expert * (share * (len(expert_layers) - own_layers) + (last - first - in_column) * len(expert_layers))
        )
        received.append(sum(dense.values()) - held + experts[-1])
    local_names = [_local_names(table, train, stage) for stage in range(train.pp)]
    tensors = sum(len(names) for names in local_names)
    gathers = max(sum(parts > 1 for parts in names.values()) for names in local_names)
    return PerTensorStatistics(
        received=Spread.of(np.array(received)),
        expert_received=Spread.of(np.array(experts)),
        collectives=tensors * (train.pp > 1) + gathers + 2 * len(expert_layers),
        object_collectives=2 * tensors,
        # The gathered parts, their concatenation and the rank's own part of the largest tensor exist at the same time.
        staging_peak=int(max(dense.values()) * (2 + 1 / train.tp)) if train.tp > 1 else max(dense.values()),
    )


def _size(dims: Sequence[int], itemsize: int) -> int:
    return int(np.prod(dims)) * itemsize


def _layer(name: str) -> int:
    return int(name.split(".")[2])


def _local_names(table: Table, train: TrainPlacement, stage: int) -> dict[str, int]:
    """Return the training tensors of one stage, with the number of tensor parallel ranks over which each is cut."""
    rank = stage * train.tp * train.dp
    shapes = table.shapes
    names: dict[str, int] = {}
    for shard in table.megatron(train, rank):
        if shard.hf_name != PADDING:
            cut = EXPERT_MARK not in shard.hf_name and shard.extents != shapes[shard.hf_name]
            names[shard.local] = train.tp if cut else 1
    return names
