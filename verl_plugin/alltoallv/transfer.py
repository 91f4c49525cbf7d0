"""Plans once with all ranks, then gives verl's hand-over the buckets of each update.

A rank trains and hands weights over to the worker on its own die; or, if training and rollout have dies of their own,
it does only one of the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from post_training.device_phases import PhaseMemory
from post_training.layouts.layout import Shard, Table, matrix_shards, matrix_table
from post_training.layouts.placements import PlacementError
from post_training.layouts.regions import Regions, SideRegions, regions_of, rollout_regions
from post_training.models.families import config_values, table_for
from post_training.reshard.exchange import Tensors
from post_training.reshard.handover import Exporter, HandoverError, HandoverReport, without_memory
from post_training.reshard.schedule import BucketError
from verl_plugin.alltoallv.control import Begin, Description, Inquiry, TakeMemory
from verl_plugin.alltoallv.rollout_layout import fitted
from verl_plugin.alltoallv.settings import SETTINGS_KEY, VERL_BUCKET_KEY, AlltoallvSettings


@dataclass(frozen=True)
class Training:
    """Access to the weights of a training engine.

    Attributes:
        config: the model's, from transformers.
        tensors: returns the live tensors of this rank by local name.
        shards: returns the shards of this rank; raises ValueError if no layout describes them.
    """

    config: Any
    tensors: Callable[[], Tensors]
    shards: Callable[[], list[Shard]]


@dataclass(frozen=True)
class _Report:
    """A rank's message to the others before they plan.

    Attributes:
        problem: why the rank cannot take part; empty if it can.
        model: values of the model's config.json, from a rank that trains.
        held: the regions that it trains.
        serves: its worker's description without the weights, which only this rank needs.
    """

    problem: str
    model: Mapping[str, Any] | None = None
    held: Regions | None = None
    serves: Description | None = None


class WeightTransfer:
    """The updates of one rank.

    Args:
        training: the rank's training engine; None for a rank that only hands over.
        worker: socket of the vLLM worker on its die; None for a rank that only trains.
        group: all ranks that train or hand over. The latter are in the order in which verl numbers rollout workers.
        device: of this rank.
        bucket_bytes: bytes that a rank stages in each direction; None takes the workers' option.
        store: of a group with processes of several worlds.
    """

    def __init__(
        self,
        training: Training | None,
        worker: Path | None,
        group: dist.ProcessGroup,
        device: torch.device,
        bucket_bytes: int | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self._training, self._worker, self._group, self._device = training, worker, group, device
        self._bucket_bytes, self._store = bucket_bytes, store
        self._inquiry: Inquiry | None = None
        self._own_weights: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._own_shards: list[Shard] = []
        self._exporter: Exporter | None = None
        self._version = 0

    @property
    def report(self) -> HandoverReport | None:
        """Bytes and buckets that this rank moved in the last complete update; None before the first."""
        return None if self._exporter is None else self._exporter.report

    def rollout_memory(self) -> dict[str, PhaseMemory]:
        """Return the rollouts' device memory since the last call, by phase, as the worker on this die metered it."""
        return {} if self._inquiry is None else self._inquiry.ask(TakeMemory())

    def buckets(self, step: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buckets of one update. The first call plans; every rank of the group must exhaust the iterator.

        Args:
            step: training step of the weights. In a group of several worlds every rank must pass it.

        Raises:
            HandoverError: on every rank, when a worker cannot take weights by alltoallv.
            LayoutError: on every rank, when training and rollout do not fit each other.
            ReshardError: on every rank, when one of them fails, dies, does not come or passes another step.
        """
        self._version += 1
        try:
            exporter = self._exporter = self._exporter or self._plan()
            yield from exporter.export(self._version, step, begin=self._begin, end=self._end)
        except Exception as error:
            self._give_up(str(error))
            raise

    def _plan(self) -> Exporter:
        reports: list[_Report] = [_Report("")] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, self._own_report(), group=self._group)
        common, serving = _workers(reports)
        table = matrix_table(table_for(next(report.model for report in reports if report.model is not None)))
        train, rollout = self._layouts(reports, table, common, serving)
        exporter = Exporter(
            train=train,
            own_tensors=self._training.tensors if self._training else dict,
            rollout=rollout,
            rollout_tensors=without_memory(self._own_weights),
            group=self._group,
            device=self._device,
            bucket_bytes=self._bucket_bytes or common.settings.bucket_megabytes << 20,
            verify=common.settings.verify,
            store=self._store,
            node_of=_nodes(reports, common.settings.dies_per_node),
        )
        try:
            manifest = exporter.prepare()
        except BucketError as error:  # on every rank, as all count all streams
            raise HandoverError(self._bucket_problem(common.settings, error)) from error
        if self._inquiry is not None:
            self._inquiry.ask(manifest)
        return exporter

    def _bucket_problem(self, settings: AlltoallvSettings, error: BucketError) -> str:
        """Return why the bucket is too small, under the key that sets its size."""
        own = self._bucket_bytes is None
        key = f"{SETTINGS_KEY}.bucket_megabytes" if own else VERL_BUCKET_KEY
        size = settings.bucket_megabytes if self._bucket_bytes is None else self._bucket_bytes >> 20
        return f"{key}={size} is invalid: {error}. Set it to {-(-error.least >> 20)} or more."

    def _layouts(
        self, reports: Sequence[_Report], table: Table, common: Description, serving: Sequence[int]
    ) -> tuple[SideRegions, SideRegions]:
        """Return the regions that each rank trains and serves, each side with this rank's local shards."""
        own, names = dist.get_rank(self._group), tuple(table.shapes)
        nothing = regions_of((), ())
        rollout, served = [nothing] * len(reports), list[Shard]()
        placement = replace(common.placement, instances=len(serving) // common.placement.world_size)
        for place, (rank, regions) in enumerate(zip(serving, rollout_regions(table, placement), strict=True)):
            rollout[rank] = regions
            if rank == own:
                served = fitted(table.vllm_ascend(placement, place), self._own_weights)
        train = [report.held or nothing for report in reports]
        return SideRegions(names, train, self._own_shards), SideRegions(names, rollout, served)

    def _own_report(self) -> _Report:
        try:
            model, held, serves = None, None, None
            if self._worker is not None:
                self._inquiry = self._inquiry or Inquiry(self._worker)
                serves = self._inquiry.greet()
                self._own_weights = serves.weights
                serves = replace(serves, weights={})
            if self._training is not None:
                model = config_values(self._training.config)
                shapes = table_for(model).shapes
                self._own_shards = matrix_shards(self._training.shards(), shapes)
                held = regions_of(self._own_shards, tuple(shapes))
            return _Report(serves.problem if serves else "", model, held, serves)
        except (HandoverError, PlacementError, ValueError) as error:
            return _Report(str(error))

    def _begin(self) -> None:
        """Announce the update to the worker."""
        if self._inquiry is not None:
            self._inquiry.ask(Begin(self._version))

    def _end(self) -> None:
        """Raise HandoverError if the worker has ended, in whose place verl's sender was answered."""
        if self._inquiry is not None:
            self._inquiry.check()

    def _give_up(self, reason: str) -> None:
        if self._inquiry is not None:
            try:
                self._inquiry.abandon(self._version, reason)
            except Exception:  # noqa: S110 - what ended the update is raised, and the worker may be what failed
                pass


def _workers(reports: Sequence[_Report]) -> tuple[Description, list[int]]:
    """Return the description that all workers share, and the ranks that hand over to a worker.

    Raises:
        HandoverError: a rank has a problem, or workers are configured differently.
    """
    for rank, report in enumerate(reports):
        if report.problem:
            raise HandoverError(f"rank {rank}: {report.problem}")
    serving = {rank: report.serves for rank, report in enumerate(reports) if report.serves is not None}
    first, common = next(iter(serving.items()))
    for rank, each in serving.items():
        if (each.placement, each.settings) != (common.placement, common.settings):
            raise HandoverError(
                f"the vLLM worker of rank {rank} has {each.placement} and {each.settings}, unlike rank {first}"
            )
    if len(serving) % common.placement.world_size:
        raise HandoverError(f"{len(serving)} ranks cannot be shared by instances of {common.placement}")
    return common, list(serving)


def _nodes(reports: Sequence[_Report], dies: int | None) -> list[int] | None:
    """Return the node of every rank; ranks that hand over without training begin a node of their own."""
    if dies is None:
        return None
    training = sum(report.held is not None for report in reports)
    first = -(-training // dies)
    behind = len(reports) - training
    return [rank // dies for rank in range(training)] + [first + rank // dies for rank in range(behind)]


def ray_job() -> str:
    """Return the ID of this process's Ray job, which verl passes on to vLLM's workers."""
    import ray

    return ray.get_runtime_context().get_job_id() if ray.is_initialized() else os.environ.get("VERL_RAY_JOB_ID", "0")
