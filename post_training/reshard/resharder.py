"""Reshard training weights into rollout weights every step, on ranks that hold both, with a plan that is made once."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from post_training.layouts.layout import EXPERT_MARK, PADDING, RolloutPlacement, Shard, TrainPlacement
from post_training.layouts.model_tensors import rollout_tensors, train_tensors
from post_training.models.families import table_for
from post_training.reshard.agreement import OwnSide, Types, agree_on_plan, agree_on_types
from post_training.reshard.exchange import Exchange, Side, Tensors
from post_training.reshard.failure import (
    MEMBERSHIP_CHECK_S,
    Attempt,
    MembershipCheck,
    agree_on_success,
    naming_the_missing,
)
from post_training.reshard.overlaps import LayoutError, Layouts
from post_training.reshard.plan import ReshardPlan, Transfers, make_plan
from post_training.reshard.schedule import BucketError, bucket_count, schedule, shard_origins
from post_training.reshard.verification import differing_tensors, first_copies
from post_training.tensor_parts import PART_ELEMENTS, copy_in_parts, zero_in_parts

BUCKET_KEY = "actor_rollout_ref.overlay.reshard.bucket_bytes"
PLANNING_COLLECTIVES = 3
"""Object collectives of the first run: tensor types, whether every rank can continue, and the digest of the plan."""


@dataclass(frozen=True)
class ReshardReport:
    """Traffic of one run on this rank. Bytes are payload.

    Attributes:
        bytes_copied: moved inside the rank.
        expert_bytes_sent, expert_bytes_received, expert_bytes_copied: the part of routed experts, whose memory order
            changes once, when they are packed or copied.
        collectives: all of the run: one per bucket, one in which all ranks agree on success, those of planning in the
            first run, and one that counts changed values if types differ.
        staging_bytes: largest staging memory.
        plan_seconds: 0 once the plan is cached.
        values_changed_by_casts: elements of all ranks, each counted once, that the rollout's type cannot hold.
    """

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    expert_bytes_sent: int
    expert_bytes_received: int
    expert_bytes_copied: int
    collectives: int
    object_collectives: int
    buckets: int
    staging_bytes: int
    plan_seconds: float
    seconds: float
    values_changed_by_casts: int = 0


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """One copy inside a rank: its two shards, and the region relative to each."""

    source: Shard
    target: Shard
    taken: tuple[slice, ...]
    filled: tuple[slice, ...]


@dataclass(frozen=True)
class _Prepared:
    """Everything that a run needs and that does not change from step to step.

    Attributes:
        held_types: types of training's tensors.
        casts: wire types of the tensors that travel in another type, the same on all ranks.
        cast_shards: the shards of them whose changed values this rank counts, so that every element is counted once.
    """

    source: Side
    target: Side
    held_types: Types
    casts: Types
    cast_shards: list[Shard]
    exchanges: list[Exchange]
    copies: list[LocalCopy]
    padding: list[Shard]
    device: torch.device
    digest: str
    sent: int
    received: int
    copied: int
    expert_sent: int
    expert_received: int
    expert_copied: int


class Resharder:
    """Writes the training weights, bit for bit, into the live rollout tensors of every rank.

    Args:
        train_tensors, rollout_tensors: live tensors of this rank by local name. The tensor objects are kept and `.data`
            is read at every run, so offloading may replace it in between.
        train_layouts, rollout_layouts: shards of all ranks, by rank of `group`.
        group: all ranks.
        bucket_bytes: upper bound of staging memory in each direction. At most `PART_ELEMENTS` of it are used, so that
            no collective and no copy counts 2**30 elements.
        castable: endings of HF names whose type may differ between training and rollout; any other difference is an
            error. A cast happens while packing, so the wire carries the rollout type; values that it changes are
            counted.
        overlap: whether to halve the buckets and pack one while the previous one travels; this doubles the collectives.
        ranks_per_node: regions that many ranks of a node need enter the node once and are relayed inside it; None means
            that links between all ranks are alike, and every region comes directly from an owner.
        progress: called after every bucket of a run.
    """

    def __init__(
        self,
        train_tensors: Tensors,
        rollout_tensors: Tensors,
        train_layouts: Layouts,
        rollout_layouts: Layouts,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        castable: tuple[str, ...] = (),
        overlap: bool = False,
        ranks_per_node: int | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        if bucket_bytes <= 0:
            raise ValueError(f"{BUCKET_KEY}={bucket_bytes} is invalid: a bucket has bytes. Set it to 1 or more.")
        self._train_tensors, self._rollout_tensors = train_tensors, rollout_tensors
        self._train_layouts, self._rollout_layouts = train_layouts, rollout_layouts
        self._group, self._castable, self._progress = group, castable, progress
        self._bucket_bytes = min(bucket_bytes, PART_ELEMENTS)
        self._slots, self._ranks_per_node = 2 if overlap else 1, ranks_per_node
        self._prepared: _Prepared | None = None
        self._runs = 0

    def run(self) -> ReshardReport:
        """Move the weights. Every rank of the group must call it; the first call also plans.

        Raises LayoutError on every rank if models, layouts or types do not fit each other, and ReshardError on every
        rank if one of them fails, dies or does not come; then some rollout weights are old and some new.
        """
        begin = time.perf_counter()
        cold = self._prepared is None
        prepared = self._prepared = self._prepared or self._prepare()
        planned = time.perf_counter()
        self._runs += 1
        attempt = Attempt()
        membership = MembershipCheck(self._group, f"reshard {prepared.digest} {self._runs}", MEMBERSHIP_CHECK_S)
        with torch.no_grad():
            attempt.step("before the first bucket, ", clear_padding, prepared.padding, prepared.target)
            attempt.step("before the first bucket, ", copy_local, prepared.copies, prepared.source, prepared.target)
            with naming_the_missing(attempt, membership):
                staging = [exchange.run(attempt) for exchange in prepared.exchanges]
                agree_on_success(attempt, self._group, prepared.device)
            changed = self._values_changed(prepared)
        buckets = sum(len(exchange.buckets) for exchange in prepared.exchanges)
        objects = PLANNING_COLLECTIVES if cold else 0
        return ReshardReport(
            bytes_sent=prepared.sent,
            bytes_received=prepared.received,
            bytes_copied=prepared.copied,
            expert_bytes_sent=prepared.expert_sent,
            expert_bytes_received=prepared.expert_received,
            expert_bytes_copied=prepared.expert_copied,
            collectives=buckets + 1 + objects + bool(prepared.casts),
            object_collectives=objects,
            buckets=buckets,
            staging_bytes=max(staging),
            plan_seconds=planned - begin if cold else 0.0,
            seconds=time.perf_counter() - begin,
            values_changed_by_casts=changed,
        )

    def _values_changed(self, prepared: _Prepared) -> int:
        """Count the elements that casts change, over all ranks. One all-reduce if any type differs, none otherwise."""
        if not prepared.casts:
            return 0
        changed = torch.zeros(1, dtype=torch.int64, device=prepared.device)
        for shard in prepared.cast_shards:
            changed += changed_by_cast(shard.locate(self._train_tensors), prepared.casts[shard.hf_name])
        dist.all_reduce(changed, group=self._group)
        return int(changed)

    def verify(self) -> list[str]:
        """Compare all rollout weights with the training weights and return the HF names that differ.

        Weights of one type are compared bit for bit, others by value, so that a cast that rounds shows.

        Every rank of the group must call it and gets the same list. It communicates the whole model: for tests.
        """
        prepared = self._prepared = self._prepared or self._prepare()
        with torch.no_grad():
            source = Side(self._train_tensors, prepared.source.shards, prepared.held_types)
            return differing_tensors(
                source, prepared.target, self._train_layouts, self._group, self._bucket_bytes, prepared.device
            )

    def _prepare(self) -> _Prepared:
        rank = dist.get_rank(self._group)
        train, rollout = self._train_layouts[rank], self._rollout_layouts[rank]
        held_types, needed_types = self._agree_on_types()
        wire_types = held_types | needed_types
        casts = {name: wire_types[name] for name, kind in held_types.items() if wire_types[name] != kind}
        world_size = len(self._train_layouts)
        nodes = None if self._ranks_per_node is None else [other // self._ranks_per_node for other in range(world_size)]
        plan = make_plan(
            self._train_layouts, self._rollout_layouts, lambda name: wire_types[name].itemsize, node_of=nodes
        )
        counts = [self._bucket_count(leg, world_size) for leg in (plan.remote, plan.relay)]
        agree_on_plan(f"{plan.digest} {counts}", self._group)
        origins = shard_origins(train), shard_origins(rollout)
        traffic = plan.remote.between(world_size) + plan.relay.between(world_size)
        source = Side(self._train_tensors, train, wire_types)
        target = Side(self._rollout_tensors, rollout, wire_types)
        direct = schedule(plan.remote, world_size, rank, counts[0], origins)
        relayed = schedule(plan.relay, world_size, rank, counts[1], (origins[1], origins[1]))
        device = next(iter(self._rollout_tensors.values())).device
        common = self._group, self._slots, device, self._progress
        return _Prepared(
            source=source,
            target=target,
            held_types=held_types,
            casts=casts,
            cast_shards=[shard for shard in list(first_copies(self._train_layouts))[rank] if shard.hf_name in casts],
            exchanges=[
                Exchange("leg from training weights", direct, source, target, *common),
                Exchange("relay inside nodes", relayed, target, target, *common),
            ],
            copies=local_copies(plan, rank, train, rollout),
            padding=[shard for shard in rollout if shard.hf_name == PADDING],
            device=device,
            digest=plan.digest[:16],
            sent=int(traffic[rank].sum()),
            received=int(traffic[:, rank].sum()),
            copied=int(plan.local.bytes[plan.local.target == rank].sum()),
            expert_sent=_expert_bytes(plan, (plan.remote, plan.relay), lambda leg: leg.source == rank),
            expert_received=_expert_bytes(plan, (plan.remote, plan.relay), lambda leg: leg.target == rank),
            expert_copied=_expert_bytes(plan, (plan.local,), lambda leg: leg.target == rank),
        )

    def _bucket_count(self, leg: Transfers, world_size: int) -> int:
        try:
            return bucket_count(leg, world_size, self._bucket_bytes // self._slots)
        except BucketError as error:
            raise ValueError(
                f"{BUCKET_KEY}={self._bucket_bytes} is invalid: {error}. Set it to {error.least * self._slots} or more."
            ) from error

    def _agree_on_types(self) -> tuple[Types, Types]:
        """Return the types of training's tensors and of the rollout's."""
        rank = dist.get_rank(self._group)
        sides = [(self._train_tensors, self._train_layouts), (self._rollout_tensors, self._rollout_layouts)]
        held, needed = agree_on_types([OwnSide.of(*side, rank) for side in sides], self._group)
        for name, kind in needed.items():
            if held.get(name, kind) != kind and not name.endswith(self._castable):
                raise LayoutError(f"{name}: training has {held[name]}, but the rollout {kind}, and no cast is declared")
        return held, needed


def changed_by_cast(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return how many of `values` the type `kind` cannot hold exactly, as an int64 scalar. NaN stays NaN: no change."""
    back = values.to(kind).to(values.dtype)
    return ((back != values) & ~(back.isnan() & values.isnan())).sum()


def local_copies(plan: ReshardPlan, rank: int, train: Sequence[Shard], rollout: Sequence[Shard]) -> list[LocalCopy]:
    """Return all copies inside this rank."""
    mine = plan.local.select(np.flatnonzero(plan.local.target == rank))
    copies = []
    for source_at, target_at, bounds in zip(mine.source_shard, mine.target_shard, mine.bounds.tolist(), strict=True):
        source, target = train[source_at], rollout[target_at]
        region = ((bounds[0], bounds[1]), (bounds[2], bounds[3]))[: len(source.bounds)]
        copies.append(LocalCopy(source, target, _inside(region, source), _inside(region, target)))
    return copies


def clear_padding(padding: Iterable[Shard], target: Side) -> None:
    """Zero the memory that belongs to no HuggingFace tensor."""
    for shard in padding:
        zero_in_parts(shard.locate(target.tensors))


def copy_local(copies: Iterable[LocalCopy], source: Side, target: Side) -> None:
    """Carry out the copies between live tensors."""
    for copy in copies:
        values = copy.source.locate(source.tensors)[copy.taken]
        copy_in_parts(copy.target.locate(target.tensors)[copy.filled], values)


def _inside(region: tuple[tuple[int, int], ...], shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(region, shard.bounds, strict=True))


def _expert_bytes(plan: ReshardPlan, legs: Iterable[Transfers], chosen: Callable[[Transfers], np.ndarray]) -> int:
    """Return the bytes of routed experts in those transfers of `legs` that `chosen` marks."""
    expert = np.array([EXPERT_MARK in name for name in plan.names], dtype=bool)
    return sum(int(leg.bytes[chosen(leg) & expert[leg.name]].sum()) for leg in legs)


def resharder_for(
    hf_config: Any,
    train_modules: nn.Module | Iterable[nn.Module],
    rollout_model: nn.Module,
    train_placement: TrainPlacement,
    rollout_placement: RolloutPlacement,
    group: dist.ProcessGroup,
    bucket_bytes: int,
    overlap: bool = False,
    ranks_per_node: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Resharder:
    """Make a Resharder from the models themselves; see there for further arguments.

    Args:
        hf_config: transformers config of the model.
        train_modules: verl's actor module(s), wrapped or not.
        group: all ranks, in the order of both placements.

    Raises:
        ValueError: the model has no sharding spec, or sizes do not fit.
    """
    table = table_for(hf_config)
    world_size = dist.get_world_size(group)
    for name, placement in (("training", train_placement), ("rollout", rollout_placement)):
        if placement.world_size != world_size:
            raise ValueError(f"the {name} placement {placement} needs {placement.world_size} ranks, not {world_size}")
    ranks = range(world_size)
    return Resharder(
        train_tensors(train_modules),
        rollout_tensors(rollout_model),
        [table.megatron(train_placement, rank) for rank in ranks],
        [table.vllm_ascend(rollout_placement, rank) for rank in ranks],
        group,
        bucket_bytes,
        table.castable,
        overlap,
        ranks_per_node,
        progress,
    )
