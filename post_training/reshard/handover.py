"""Hand training weights over to a rollout in another process on the same die.

The training process and the rollout's share the die but no process group: HCCL allows one rank per device in a
communicator. So the training ranks exchange among themselves, and each hands the bytes over to the process on its die,
bucket by bucket, through any channel that carries named tensors between the two. The rollout process writes them into
its live weights. Neither ever holds a gathered tensor.

With training and rollout on separate dies, one group has ranks of both: training ranks serve nothing, and serving ranks
hold no training weights. Each serving rank hands over the bytes that it received.

    training rank               same die         rollout worker
    Exporter.prepare()   ---- Manifest once --->  Importer(manifest)
    Exporter.export()    ---- named buckets --->  Importer.take(), then finish()
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from post_training.layouts.layout import PADDING, Shard
from post_training.layouts.regions import SideRegions, layouts_of
from post_training.reshard.agreement import OwnSide, agree_on_plan, agree_on_types, share_beside_plan
from post_training.reshard.exchange import Exchange, Side, Staging, Tensors, pack, scatter
from post_training.reshard.failure import (
    MEMBERSHIP_CHECK_S,
    Attempt,
    MembershipCheck,
    agree_on_success,
    naming_the_missing,
)
from post_training.reshard.overlaps import Layouts
from post_training.reshard.rank_plan import Joined, make_rank_plan
from post_training.reshard.relays import RelayedPlan
from post_training.reshard.schedule import (
    ALIGNMENT,
    Bucket,
    Direction,
    bucket_count,
    buckets_of_traffic,
    schedule,
    shard_origins,
)
from post_training.reshard.verification import Batch, Targets, batches, broadcast
from post_training.tensor_parts import PART_ELEMENTS, zero_in_parts

LOCAL, REMOTE, VERIFY, WHOLE = "local", "remote", "verify", "whole"
"""Kinds of buckets, the first part of their names. A number follows; for `WHOLE`, the last bucket, the update's."""


class HandoverError(RuntimeError):
    """An update did not arrive as announced; the rollout's weights are incomplete or differ."""


@dataclass(frozen=True)
class Manifest:
    """Everything that a rollout worker needs to know about the updates of one run.

    Attributes:
        digest: of the plan.
        shards: the worker's layout.
        wire_types: of each HF tensor in it.
        buckets: places of the chunks in each bucket, by the bucket's name, in order of arrival.
        comparison: batches of all training weights, which follow the buckets if updates are verified.
    """

    digest: str
    shards: Sequence[Shard]
    wire_types: Mapping[str, torch.dtype]
    buckets: Mapping[str, Direction]
    comparison: Sequence[Batch] = ()

    @property
    def names(self) -> list[str]:
        """Names of all buckets of an update except the last, `WHOLE`."""
        return [*self.buckets, *(f"{VERIFY}/{number}" for number in range(len(self.comparison)))]


@dataclass(frozen=True)
class HandoverReport:
    """Traffic of one update on this rank. Bytes are payload.

    Attributes:
        bytes_copied: bytes that stay on the die.
        collectives: all of the update, including the last, in which all ranks agree.
        staging_bytes: device memory for both directions together.
    """

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    collectives: int
    buckets: int
    staging_bytes: int


@dataclass(frozen=True)
class _Scheduled:
    """The buckets of this rank, within its own die and between dies; payload in bytes, as in the report."""

    digest: str
    local: Sequence[Bucket]
    remote: Sequence[Bucket]
    bytes_copied: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class _Prepared:
    manifest: Manifest
    local: Sequence[Bucket]
    exchange: Exchange
    report: HandoverReport


class Exporter:
    """The training side of one rank.

    Args:
        train: regions that all ranks train.
        own_tensors: returns the live training tensors of this rank by local name. It is called at each update, so that
            offloading may replace them in between.
        rollout: regions that the rollout worker on each rank's die serves.
        rollout_tensors: shape and type of the worker's weights by local name, as tensors without memory.
        group: the training ranks.
        device: for staging.
        bucket_bytes: upper bound of staging memory in each direction.
        verify: whether the worker compares every update with all training weights, which broadcasts the whole model.
        progress: called after every bucket.
        store: of a group with processes of several worlds; see `MembershipCheck`.
        node_of: the node of every rank, numbered from 0. Bytes that several ranks of a node need enter it once, see
            `relays`. None means that all links are alike.
    """

    def __init__(
        self,
        train: SideRegions,
        own_tensors: Callable[[], Tensors],
        rollout: SideRegions,
        rollout_tensors: Tensors,
        group: dist.ProcessGroup,
        device: torch.device,
        bucket_bytes: int,
        verify: bool = False,
        progress: Callable[[], None] = lambda: None,
        store: dist.Store | None = None,
        node_of: Sequence[int] | None = None,
    ) -> None:
        self._store, self._node_of = store, node_of
        self._train_side, self._rollout_side = train, rollout
        self._own_tensors, self._rollout_tensors = own_tensors, rollout_tensors
        self._group, self._device, self._progress, self._verify = group, device, progress, verify
        self._bucket_bytes = min(bucket_bytes, PART_ELEMENTS)
        self.report: HandoverReport | None = None
        self._prepared: _Prepared | None = None
        self._train: dict[str, torch.Tensor] = {}

    def prepare(self) -> Manifest:
        """Plan the updates. Every rank of the group must call it; it exchanges three small objects.

        Raises LayoutError on every rank if models, layouts or types do not fit each other.
        """
        rank = dist.get_rank(self._group)
        train, rollout = self._train_side, self._rollout_side
        self._train.update(self._own_tensors())
        sides = (self._train, train), (self._rollout_tensors, rollout)
        _, wire_types = agree_on_types(
            [OwnSide(tensors, side.own, side.first_held(rank)) for tensors, side in sides], self._group
        )
        plan = self._relayed_plan(wire_types) if self._node_of else self._direct_plan(wire_types)
        # Buckets in which the worker receives nothing are left out.
        buckets = {
            f"{kind}/{number}": step.receive
            for kind, steps in ((LOCAL, plan.local), (REMOTE, plan.remote))
            for number, step in enumerate(steps)
            if step.receive.size
        }
        compared: list[Batch] = []
        used = {shard.hf_name: wire_types[shard.hf_name] for shard in rollout.own if shard.hf_name != PADDING}
        if self._verify:
            layouts = layouts_of(train.ranks, train.names)
            layouts[rank] = list(train.own)
            compared = list(batches(_within(layouts, wire_types), wire_types, self._bucket_bytes))
            used = wire_types
        manifest = Manifest(plan.digest[:16], rollout.own, used, buckets, compared)
        self._prepared = self._prepare(plan, manifest, wire_types)
        return manifest

    def _direct_plan(self, wire_types: Mapping[str, torch.dtype]) -> _Scheduled:
        """Plan so that every rank receives each region directly from a rank that trains it."""
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        train, rollout = self._train_side, self._rollout_side
        plan = make_rank_plan(train.ranks, rollout.ranks, train.names, partial(_itemsize, wire_types), rank)
        local_traffic = np.diag(np.diag(plan.traffic))
        counts = [
            buckets_of_traffic(traffic, plan.widest_row, self._bucket_bytes)
            for traffic in (local_traffic, plan.traffic - local_traffic)
        ]
        agree_on_plan(f"{plan.digest} {counts}", self._group)
        origins = shard_origins(train.own), shard_origins(rollout.own)
        remote = plan.remote
        return _Scheduled(
            digest=plan.digest,
            local=schedule(plan.local, world_size, rank, counts[0], origins),
            remote=schedule(remote, world_size, rank, counts[1], origins),
            bytes_copied=int(plan.local.bytes.sum()),
            bytes_sent=int(remote.bytes[remote.source == rank].sum()),
            bytes_received=int(remote.bytes[remote.target == rank].sum()),
        )

    def _relayed_plan(self, wire_types: Mapping[str, torch.dtype]) -> _Scheduled:
        """Plan so that bytes that several ranks of a node need enter it once."""
        assert self._node_of is not None
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        train, rollout = self._train_side, self._rollout_side
        joined = Joined.of(train.ranks, rollout.ranks, train.names, partial(_itemsize, wire_types))
        plan = RelayedPlan(joined, rank, np.array(self._node_of))
        loads = share_beside_plan(f"{plan.digest} {self._bucket_bytes}", plan.load, self._group)
        origins = shard_origins(train.own), shard_origins(rollout.own)
        remote = plan.buckets(max(load.buckets(self._bucket_bytes) for load in loads), origins)
        own = bucket_count(plan.local, world_size, self._bucket_bytes)
        return _Scheduled(
            digest=plan.digest,
            local=schedule(plan.local, world_size, rank, own, origins),
            remote=remote,
            bytes_copied=int(plan.local.bytes.sum()),
            bytes_sent=sum(step.send_bytes for step in remote),
            bytes_received=sum(step.receive.chunk_bytes for step in remote),
        )

    def _prepare(self, plan: _Scheduled, manifest: Manifest, wire_types: Mapping[str, torch.dtype]) -> _Prepared:
        local, remote = plan.local, plan.remote
        source = Side(self._train, self._train_side.own, wire_types)
        target = Side({}, self._rollout_side.own, wire_types)
        exchange = Exchange(
            "leg from training weights", remote, source, target, self._group, 1, self._device, self._progress
        )
        received = max((step.receive.size for step in remote), default=0)
        report = HandoverReport(
            bytes_sent=plan.bytes_sent,
            bytes_received=plan.bytes_received,
            bytes_copied=plan.bytes_copied,
            collectives=len(remote) + len(manifest.comparison) + 1,
            buckets=len(remote),
            staging_bytes=max(_largest(remote), _largest(local)) + received,
        )
        return _Prepared(manifest, local, exchange, report)

    def export(
        self,
        version: int,
        stamp: int | None = None,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buckets of one update by name: bytes on the device, which the next one overwrites.

        Every rank of the group must exhaust it; `report` then has the traffic.

        Args:
            version: number of the update.
            stamp: the step whose weights are sent, if ranks could differ.
            begin: called before the first bucket. If it raises, this rank takes part nevertheless, so that all ranks
                learn of it.
            end: called after the last bucket, likewise.

        Raises:
            ReshardError: on every rank, if one of them fails, dies, does not come or has another stamp.
        """
        assert self._prepared is not None, "prepare() comes first"
        prepared, attempt = self._prepared, Attempt()
        attempt.step("before the first bucket: ", begin)
        attempt.step("before the first bucket, ", self._refresh)
        name = f"handover {prepared.manifest.digest} {version}"
        membership = MembershipCheck(self._group, name, MEMBERSHIP_CHECK_S, self._store)
        with torch.no_grad():
            with naming_the_missing(attempt, membership):
                yield from self._weights(prepared, attempt)
                yield from self._comparison(prepared, attempt)
                attempt.step("by its last bucket: ", end)
                agree_on_success(attempt, self._group, self._device, stamp)
        self.report = prepared.report
        yield f"{WHOLE}/{version}", torch.zeros(ALIGNMENT, dtype=torch.uint8, device=self._device)

    def _refresh(self) -> None:
        """Look the weights up again: training may hold them in other tensors than before."""
        self._train.clear()
        self._train.update(self._own_tensors())

    def _own_buckets(
        self, prepared: _Prepared, attempt: Attempt, staging: Staging
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buckets that stay on the die, staged too because the worker cannot access training's memory."""
        for number, step in enumerate(prepared.local):
            if step.send.size:
                where = f"in bucket {number + 1} of {len(prepared.local)} of the die's own, "
                attempt.step(where, pack, prepared.exchange.source, step.send, staging.send[0])
                yield f"{LOCAL}/{number}", staging.send[0][: step.send.size]

    def _weights(self, prepared: _Prepared, attempt: Attempt) -> Iterator[tuple[str, torch.Tensor]]:
        staging = Staging(prepared.exchange.buckets, 1, self._device, least=_largest(prepared.local))
        yield from self._own_buckets(prepared, attempt, staging)
        for number, received in prepared.exchange.arrivals(attempt, staging):
            if received.numel():
                yield f"{REMOTE}/{number}", received

    def _comparison(self, prepared: _Prepared, attempt: Attempt) -> Iterator[tuple[str, torch.Tensor]]:
        source = prepared.exchange.source
        for number, batch in enumerate(prepared.manifest.comparison):
            attempt.reached = f"in batch {number + 1} of {len(prepared.manifest.comparison)} of the comparison"
            yield f"{VERIFY}/{number}", broadcast(batch, source, self._group, self._device)


def _largest(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of staging memory that sending these buckets takes."""
    return max((step.send.size for step in buckets), default=0)


def _itemsize(wire_types: Mapping[str, torch.dtype], name: str) -> int:
    """Return the bytes of an element on the wire; 1 for a tensor that the rollout does not hold: it never travels."""
    return wire_types[name].itemsize if name in wire_types else 1


def _within(layouts: Layouts, wire_types: Mapping[str, torch.dtype]) -> Layouts:
    return [[shard for shard in shards if shard.hf_name in wire_types] for shards in layouts]


class Importer:
    """The rollout's side of one die: writes the buckets of one update into live tensors.

    Args:
        manifest: from the die's training rank.
        tensors: live weights by local name.
        version: number of the expected update.
    """

    def __init__(self, manifest: Manifest, tensors: Tensors, version: int) -> None:
        self._manifest = manifest
        self._side = Side(tensors, manifest.shards, manifest.wire_types)
        self._targets = Targets(self._side)
        self._version = version
        self._expected = [*manifest.names, f"{WHOLE}/{version}"]
        self._arrived = 0
        self._differing: set[str] = set()
        for shard in manifest.shards:
            if shard.hf_name == PADDING:
                zero_in_parts(shard.locate(tensors))

    def take(self, name: str, content: torch.Tensor) -> None:
        """Write one bucket.

        Raises:
            HandoverError: it is not the next one of this update.
            TransferError: it could not be written; it names the weight.
        """
        wanted = self._expected[self._arrived] if self._arrived < len(self._expected) else "nothing"
        if name != wanted:
            raise HandoverError(f"bucket {name} came in update {self._version}, but {wanted} was expected")
        self._arrived += 1
        kind, _, number = name.partition("/")
        if kind == VERIFY:
            batch = self._manifest.comparison[int(number)]
            self._differing |= self._targets.differing(batch, content, self._manifest.wire_types)
        elif kind != WHOLE:
            direction = self._manifest.buckets[name]
            if direction.size != content.numel():
                raise HandoverError(f"bucket {name} has {content.numel()} bytes, but {direction.size} were expected")
            scatter(self._side, direction, content)

    def finish(self) -> None:
        """Check that the update is complete.

        Raises:
            HandoverError: a bucket is missing, or verification found weights that differ from training's.
        """
        missing = self._expected[self._arrived :]
        if missing:
            raise HandoverError(f"update {self._version} ended before bucket {missing[0]}")
        if self._manifest.comparison:
            self._differing |= self._targets.dirty_padding()
        if self._differing:
            some, count = ", ".join(sorted(self._differing)[:3]), len(self._differing)
            raise HandoverError(f"{count} weights differ from training's after update {self._version}: {some}")


def without_memory(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Any]:
    """Return tensors of these shapes and types on the meta device, for `Exporter.rollout_tensors`."""
    return {name: torch.empty(shape, dtype=kind, device="meta") for name, (shape, kind) in shapes.items()}
