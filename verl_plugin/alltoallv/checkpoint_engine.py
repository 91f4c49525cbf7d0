"""verl's checkpoint engine `alltoallv`: weights from training dies to rollout dies, each region to those that serve it.

Registered when `actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module` names this module and `backend` is
`alltoallv`. Training ranks and the ranks beside vLLM's workers are one process group. Upstream's engine for HCCL
gathers every tensor on all training ranks and broadcasts it whole from the first one. Here each training rank sends its
own shards, and a rollout rank receives only the bytes that its worker serves.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import socket
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id, get_device_name

from post_training.reshard.handover import HandoverError, HandoverReport
from verl_plugin.alltoallv.addresses import control_path, register_adapter
from verl_plugin.alltoallv.export import OfferedWeights
from verl_plugin.alltoallv.joint_group import join, leave
from verl_plugin.alltoallv.settings import BACKEND, LIBRARY, LIBRARY_KEY
from verl_plugin.alltoallv.transfer import WeightTransfer, ray_job

_STANDALONE = re.compile(r"rollout_standalone_(\d+)")
OPTIONS_KEY = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{BACKEND}"


register_adapter()


@dataclass(frozen=True)
class Member:
    """A rank's introduction before it joins the group.

    Attributes:
        identity: new after a failure, so that all ranks join again.
        address: host and port of the store, from the first training rank, which keeps it; None from all others.
    """

    identity: str
    address: tuple[str, int] | None


@CheckpointEngineRegistry.register(BACKEND)
class AlltoallvCheckpointEngine(CheckpointEngine):
    """One rank of the group.

    Args:
        bucket_size: bytes that this rank stages in each direction: verl's `update_weights_bucket_megabytes`.
        is_master: whether this is the first training rank.
        timeout_seconds: of one collective; then an error names the missing ranks. On NPUs HCCL_EXEC_TIMEOUT applies
            too.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_seconds: int = 600) -> None:
        if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int) or timeout_seconds < 1:
            raise ValueError(
                f"{OPTIONS_KEY}.timeout_seconds={timeout_seconds!r} is invalid: a collective needs time. Set it to a "
                "whole number above 0."
            )
        self._bucket_bytes, self._is_master = bucket_size, is_master
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._identity = _new_identity()
        self._server: dist.TCPStore | None = None
        self._store: dist.Store | None = None
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._trainers = 0
        self._transfer: WeightTransfer | None = None
        self._updates = 0

    @property
    def report(self) -> HandoverReport | None:
        """Bytes and buckets that this rank moved in the last complete update; None before the first."""
        return None if self._transfer is None else self._transfer.report

    def prepare(self) -> Member:
        """Return this rank's introduction; the first training rank opens the group's store."""
        if not self._is_master:
            return Member(self._identity, None)
        host = ray.util.get_node_ip_address().strip("[]") if ray.is_initialized() else "127.0.0.1"
        if self._server is None:
            self._server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return Member(self._identity, (host, self._server.port))

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Member]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Number training ranks first and rollout ranks after them; name the group after its members."""
        size = actor_wg_world_size + rollout_world_size
        address = next(member.address for member in metadata if member.address is not None)
        name = hashlib.sha256("\n".join(member.identity for member in metadata).encode()).hexdigest()[:16]
        common = {"world_size": size, "trainers": actor_wg_world_size, "address": address, "name": name}

        def arguments(ranks: range) -> dict[str, list[Any]]:
            return {"rank": list(ranks)} | {key: [value] * len(ranks) for key, value in common.items()}

        return arguments(range(actor_wg_world_size)), arguments(range(actor_wg_world_size, size))

    def init_process_group(
        self, rank: int, world_size: int, trainers: int, address: tuple[str, int], name: str
    ) -> None:
        """Join the group, unless this rank is still in it from the last update."""
        if self._group is not None:
            if self._name == name:
                return
            leave(self._group)
        host, port = address
        self._store = self._server or dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
        self._group = join(self._store, rank, world_size, f"{BACKEND}.{name}", self._timeout)
        self._name, self._trainers, self._transfer, self._updates = name, trainers, None, 0

    def finalize(self) -> None:
        """Free the staging memory; the group stays for the next update."""
        torch.npu.empty_cache()

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Send this training rank's shards.

        Raises:
            HandoverError: the training engine does not offer its shards.
            ReshardError: on every rank, when one of them fails, dies or is at another step.
        """
        if not isinstance(weights, OfferedWeights):
            raise HandoverError(
                f"{LIBRARY_KEY} is invalid: training offers whole tensors, and checkpoint_engine.backend={BACKEND} "
                f"takes the shards of strategies fsdp2 and megatron. Set it to {LIBRARY}."
            )
        for _ in self._update(weights, global_steps):
            pass
        if self.report is None:
            return {}
        return {"alltoallv/bytes_sent": self.report.bytes_sent, "alltoallv/buckets": self.report.buckets}

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the buckets that the vLLM worker on this die serves.

        Raises:
            ReshardError: on every rank, when one of them fails, dies or is at another step.
        """
        for bucket in self._update(None, global_steps):
            yield bucket

    def _update(self, weights: OfferedWeights | None, global_steps: int | None) -> Any:
        assert self._group is not None, "init_process_group comes first"
        self._updates += 1
        whole = False
        try:
            if self._transfer is None:
                self._transfer = self._new_transfer(weights)
            yield from self._transfer.buckets(self._updates if global_steps is None else global_steps)
            whole = True
        finally:
            if not whole:  # a communicator's state after a failure is undefined: all ranks join again
                self._identity = _new_identity()

    def _new_transfer(self, weights: OfferedWeights | None) -> WeightTransfer:
        assert self._group is not None
        place = dist.get_rank(self._group) - self._trainers
        return WeightTransfer(
            None if weights is None else weights.training(),
            None if weights is not None else control_path(ray_job(), _worker_number(place)),
            self._group,
            torch.device(get_device_name(), get_device_id()),
            self._bucket_bytes,
            self._store,
        )


def _worker_number(place: int) -> int:
    """Return the number of the vLLM worker beside this rank among all workers of the job.

    In `separate_async` the training dies have replicas too, and verl numbers these first. A process learns the number
    of its replica from the name that verl gives its worker group; the group's ranks are the replica's.

    Args:
        place: this rank's number among the rollout ranks, used if the group's name has no replica number.
    """
    replica = _STANDALONE.match(os.environ.get("WG_PREFIX", ""))
    return place if replica is None else int(replica[1]) * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"])


def _new_identity() -> str:
    return f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"
