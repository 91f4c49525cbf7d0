"""The training side: plans once with all ranks, then gives verl's hand-over the buckets of each update."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from post_training.layouts.layout import Shard, Table
from post_training.layouts.placements import PlacementError
from post_training.reshard.exchange import Tensors
from post_training.reshard.handover import Exporter, HandoverError, HandoverReport, without_memory
from verl_plugin.alltoallv.control import Abandon, Begin, Description, Inquiry, control_path
from verl_plugin.alltoallv.rollout_layout import fitted


@dataclass(frozen=True)
class Training:
    """What a training engine holds.

    Attributes:
        table: of the model.
        tensors: returns the live tensors of this rank by local name.
        shards: returns the shards of this rank; raises ValueError for what it cannot describe.
    """

    table: Table
    tensors: Callable[[], Tensors]
    shards: Callable[[], list[Shard]]


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others before they plan."""

    problem: str
    description: Description | None = None
    shards: tuple[Shard, ...] = ()


class WeightTransfer:
    """The updates of one training rank.

    Args:
        training: what the rank holds.
        group: the training ranks, one a die, in the order in which verl gives them to rollout workers.
        device: of this rank.
        job: of Ray, by which the worker on the die is found.
    """

    def __init__(self, training: Training, group: dist.ProcessGroup, device: torch.device, job: str) -> None:
        self._training, self._group, self._device = training, group, device
        self._path = control_path(job, dist.get_rank(group))
        self._inquiry: Inquiry | None = None
        self._exporter: Exporter | None = None
        self._version = 0

    @property
    def report(self) -> HandoverReport | None:
        """What the last whole update moved on this rank."""
        return None if self._exporter is None else self._exporter.report

    def buckets(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one update. The first one plans; every rank of the group must exhaust it.

        Raises:
            HandoverError: on every rank, when a worker cannot take weights by alltoallv.
            LayoutError: on every rank, when training and rollout do not fit each other.
            ReshardError: on every rank, when one of them fails, dies or does not come.
        """
        self._version += 1
        try:
            exporter = self._exporter = self._exporter or self._plan()
            yield from exporter.export(self._version, self._begin())
        except Exception as error:
            self._give_up(str(error))
            raise

    def _plan(self) -> Exporter:
        reports: list[_Report] = [_Report("")] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, self._own_report(), group=self._group)
        descriptions = _descriptions(reports)
        own = descriptions[dist.get_rank(self._group)]
        placement = replace(own.placement, instances=len(reports) // own.placement.world_size)
        rollout = [self._training.table.vllm_ascend(placement, rank) for rank in range(len(reports))]
        rollout[dist.get_rank(self._group)] = fitted(rollout[dist.get_rank(self._group)], own.weights)
        exporter = Exporter(
            train_layouts=[report.shards for report in reports],
            own_tensors=self._training.tensors,
            rollout_layouts=rollout,
            rollout_tensors=without_memory(own.weights),
            group=self._group,
            device=self._device,
            bucket_bytes=own.settings.bucket_megabytes << 20,
            verify=own.settings.verify,
        )
        manifest = exporter.prepare()
        assert self._inquiry is not None
        self._inquiry.ask(manifest)
        return exporter

    def _own_report(self) -> _Report:
        try:
            self._inquiry = self._inquiry or Inquiry(self._path)
            description = self._inquiry.greet()
            return _Report(description.problem, description, tuple(self._training.shards()))
        except (HandoverError, PlacementError, ValueError) as error:
            return _Report(str(error))

    def _begin(self) -> str:
        """Announce the update; returns why that failed, which the other ranks are to hear in its course."""
        assert self._inquiry is not None
        try:
            self._inquiry.ask(Begin(self._version))
        except HandoverError as error:
            return str(error)
        return ""

    def _give_up(self, reason: str) -> None:
        if self._inquiry is not None:
            try:
                self._inquiry.ask(Abandon(self._version, reason))
            except Exception:  # noqa: S110 - what ended the update is raised, and the worker may be what failed
                pass


def _descriptions(reports: list[_Report]) -> list[Description]:
    """Of every rank's worker. Raises HandoverError when one has a problem or they were configured differently."""
    for rank, report in enumerate(reports):
        if report.problem:
            raise HandoverError(f"rank {rank}: {report.problem}")
    descriptions = [report.description for report in reports if report.description is not None]
    common = descriptions[0]
    for rank, each in enumerate(descriptions):
        if (each.placement, each.settings) != (common.placement, common.settings):
            raise HandoverError(
                f"the vLLM worker of rank {rank} has {each.placement} and {each.settings}, unlike rank 0"
            )
    if len(reports) % common.placement.world_size:
        raise HandoverError(f"{len(reports)} training ranks cannot be shared by instances of {common.placement}")
    return descriptions


def ray_job() -> str:
    """The name of this process's job, which verl gives to vLLM's workers."""
    import ray

    return ray.get_runtime_context().get_job_id() if ray.is_initialized() else os.environ.get("VERL_RAY_JOB_ID", "0")
