"""Device memory that torch does not count: the buffers of HCCL's communicators, and what CANN holds for a process."""

from __future__ import annotations

from dataclasses import dataclass

from post_training.plan.job import Job

# vLLM-Ascend's `get_fused_moe_state` exchanges tokens in another way among fewer ranks.
_LEAST_OF_FUSED_EXCHANGE = 16


@dataclass(frozen=True)
class Communicator:
    """A group of a die whose collectives run on the device.

    early: it is there when the engine measures the die. only_sends: its two ranks do nothing but send to each other.
    """

    name: str
    ranks: int
    early: bool
    only_sends: bool = False


@dataclass(frozen=True)
class OutsideTorch:
    """hccl_buffer: bytes of HCCL_BUFFSIZE. cann: bytes of a process that has done nothing but take a die.

    p2p_buffer: bytes of P2P_HCCL_BUFFSIZE, by which torch_npu makes communicators of two ranks that only send to each
    other.

    A communicator has two such buffers, one to send and one to receive ("HCCL_BUFFSIZE", CANN's environment variables).
    All are 0 on the emulated NPU unless it is told to count them.
    """

    hccl_buffer: int = 0
    cann: int = 0
    p2p_buffer: int = 0

    def at_most(self, job: Job) -> int:
        """Bytes once every group has had a collective: torch_npu makes a communicator at the first one of its group."""
        return self._bytes(communicators(job))

    def when_the_engine_is_built(self, job: Job) -> int:
        """Bytes when vLLM-Ascend sees how much of the die is taken, which is before the first update."""
        return self._bytes([each for each in communicators(job) if each.early])

    def _bytes(self, there: list[Communicator]) -> int:
        return self.cann + 2 * sum(self.p2p_buffer if each.only_sends else self.hccl_buffer for each in there)


NOTHING_OUTSIDE = OutsideTorch()


def communicators(job: Job) -> list[Communicator]:
    """The groups of one die that have collectives on the device; groups of one rank have none.

    Of training: tensors, stages, gradients of dense weights and of experts, tokens of experts, and two to send to other
    stages, since a stage has two neighbours, and with two stages Megatron sends in one direction through another group.
    Of the rollout: tensors, agreements of data-parallel engines, tokens of experts, and the fused exchange, which has a
    communicator of its own (vLLM-Ascend's `mc2` group). Of both: the world, for the reshard and, with the distributed
    optimizer, for norms of gradients.
    """
    train, rollout = job.train, job.rollout
    experts = train.ep * (train.tp if train.moe_tp_extend_ep else 1) if job.sizes.experts else 1
    served = rollout.ep if job.sizes.experts else 1
    found = [
        Communicator("world", job.dies, True),
        Communicator("training: tensors", train.tp, False),
        Communicator("training: stages", train.pp, False),
        Communicator("training: gradients", train.dp, False),
        Communicator("training: gradients of experts", train.dp // train.ep if job.sizes.experts else 1, False),
        Communicator("training: experts", experts, False),
        Communicator("rollout: tensors", rollout.tp, True),
        Communicator("rollout: engines", rollout.dp, True),
        Communicator("rollout: experts", served, True),
        Communicator("rollout: fused exchange of experts", served if served >= _LEAST_OF_FUSED_EXCHANGE else 1, True),
    ]
    neighbours = ("one", "other") if train.pp > 1 else ()
    found += [Communicator(f"training: {side} neighbour in stages", 2, False, only_sends=True) for side in neighbours]
    return [each for each in found if each.ranks > 1]
