"""Tells the vLLM engine of a die its place among the data-parallel engines of the rollout.

vLLM starts one engine in each process of verl's world. With expert parallelism the engines of an instance form one
model: those with the same tensor-parallel index synchronise over a data-parallel group of their own, which they find
through environment variables that vLLM reads.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnginePlace:
    """Place of this process: ``world`` ranks are cut into consecutive instances of ``expert_parallel`` ranks, and an
    instance into consecutive tensor-parallel groups. Instances are independent copies of the model."""

    rank: int
    world: int
    tensor_parallel: int
    expert_parallel: int

    @property
    def data_parallel(self) -> int:
        """Number of engines that form one model."""
        return self.expert_parallel // self.tensor_parallel

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's tensor-parallel group in its instance."""
        return self.rank % self.expert_parallel // self.tensor_parallel

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank in its tensor-parallel group."""
        return self.rank % self.tensor_parallel

    @property
    def instance_leader(self) -> int:
        """First rank of this rank's instance."""
        return self.rank - self.rank % self.expert_parallel


def check_expert_parallel(place: EnginePlace) -> None:
    """Raise ``ValueError`` unless the ranks divide into whole instances of whole tensor-parallel groups."""
    if place.expert_parallel % place.tensor_parallel:
        raise ValueError(
            f"an instance of {place.expert_parallel} ranks does not divide into tensor-parallel groups of "
            f"{place.tensor_parallel}. Change actor_rollout_ref.rollout.tensor_model_parallel_size"
        )
    if place.world % place.expert_parallel:
        raise ValueError(
            f"{place.world} ranks do not divide into rollout instances of expert parallel size {place.expert_parallel} "
            "(tensor x data parallel). Change actor_rollout_ref.overlay.rollout.expert_parallel_size"
        )


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Yield different TCP ports that no other process of this machine can get within this context."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        yield [probe.getsockname()[1] for probe in probes]


def address_towards(peer: str) -> str:
    """Return this machine's address on the network that reaches ``peer``, an address or a name. Nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def agreed_meeting_point(place: EnginePlace) -> tuple[str, int]:
    """Return address and port at which this rank's data-parallel group meets, on the machine of its first member.

    The first rank of an instance chooses a port for each tensor-parallel index. All first ranks hold their ports until
    every rank knows them, so that two instances on one machine never choose the same. Collective over the default
    group.
    """
    import torch.distributed as dist

    leads = place.rank == place.instance_leader
    with held_ports(place.tensor_parallel if leads else 0) as ports:
        mine = (address_towards(os.environ["MASTER_ADDR"]), ports) if leads else None
        offers: list[Any] = [None] * place.world  # (address, ports) of each leader
        dist.all_gather_object(offers, mine)
    address, chosen = offers[place.instance_leader]
    return address, chosen[place.tensor_parallel_rank]


def set_engine_environment(place: EnginePlace) -> None:
    """Export the place of this engine for vLLM. Collective over the default process group."""
    address, port = agreed_meeting_point(place)
    os.environ.update(
        VLLM_DP_SIZE=str(place.data_parallel),
        VLLM_DP_RANK=str(place.data_parallel_rank),
        VLLM_DP_RANK_LOCAL=str(place.data_parallel_rank),
        VLLM_DP_MASTER_IP=address,
        VLLM_DP_MASTER_PORT=str(port),
    )
