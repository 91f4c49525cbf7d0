"""Where a vLLM engine of one die stands among the data-parallel engines of the rollout.

vLLM starts one engine in each process of verl's world. With expert parallelism those engines form one model: engines
with the same tensor-parallel index agree over a data-parallel group of their own, which they find through environment
variables that vLLM reads.
"""

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass


@dataclass(frozen=True)
class EnginePlace:
    """Place of this process: ``world`` ranks are cut into consecutive tensor-parallel groups."""

    rank: int
    world: int
    tensor_parallel: int

    @property
    def data_parallel(self) -> int:
        """Number of engines that form one model."""
        return self.world // self.tensor_parallel

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's tensor-parallel group."""
        return self.rank // self.tensor_parallel

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank in its tensor-parallel group."""
        return self.rank % self.tensor_parallel


def check_expert_parallel(place: EnginePlace, expert_parallel: int) -> None:
    """Raise ``ValueError`` unless experts are to be spread over all ranks, the one arrangement vLLM 0.9.1 has."""
    if place.world % place.tensor_parallel:
        raise ValueError(
            f"{place.world} ranks do not divide into tensor-parallel groups of {place.tensor_parallel}: change "
            "actor_rollout_ref.rollout.tensor_model_parallel_size"
        )
    if expert_parallel != place.world:
        raise ValueError(
            f"rollout expert parallel size {expert_parallel} must be the number of ranks {place.world} "
            "(tensor x data parallel), or 1 for none"
        )


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nothing on this machine listens on at the moment."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def agreed_port(place: EnginePlace) -> int:
    """The port of this rank's data-parallel group. Each tensor-parallel index has a group and so a port of its own.

    Rank 0 chooses all ports at once, because ports held at the same time differ. Collective over the default process
    group.
    """
    import torch.distributed as dist

    ports: list[list[int] | None] = [free_ports(place.tensor_parallel) if place.rank == 0 else None]
    dist.broadcast_object_list(ports, src=0)
    return ports[0][place.tensor_parallel_rank]


def set_engine_environment(place: EnginePlace) -> None:
    """Export the place of this engine for vLLM. Collective over the default process group.

    ``MASTER_ADDR`` is the machine of rank 0, on which the first tensor-parallel group lies and so the first member of
    every data-parallel group.
    """
    os.environ.update(
        VLLM_DP_SIZE=str(place.data_parallel),
        VLLM_DP_RANK=str(place.data_parallel_rank),
        VLLM_DP_RANK_LOCAL=str(place.data_parallel_rank),
        VLLM_DP_MASTER_IP=os.environ["MASTER_ADDR"],
        VLLM_DP_MASTER_PORT=str(agreed_port(place)),
    )
