"""Device memory that torch does not count: the buffers of HCCL's communicators, and what CANN holds for a process."""

from __future__ import annotations

from dataclasses import dataclass

from post_training.plan.job import Job


@dataclass(frozen=True)
class Communicator:
    """A group of a die whose collectives run on the device. early: it is there when the engine measures the die."""

    name: str
    ranks: int
    early: bool


@dataclass(frozen=True)
class OutsideTorch:
    """hccl_buffer: bytes of HCCL_BUFFSIZE. cann: bytes of a process that has done nothing but take a die.

    A communicator has two such buffers, one to send and one to receive ("HCCL_BUFFSIZE", CANN's environment variables).
    Both are 0 on the emulated NPU.
    """

    hccl_buffer: int = 0
    cann: int = 0

    def at_most(self, job: Job) -> int:
        """Bytes once every group has had a collective: torch_npu makes a communicator at the first one of its group."""
        return self._bytes(communicators(job))

    def when_the_engine_is_built(self, job: Job) -> int:
        """Bytes when vLLM-Ascend sees how much of the die is taken, which is before the first update."""
        return self._bytes([each for each in communicators(job) if each.early])

    def _bytes(self, there: list[Communicator]) -> int:
        return self.cann + 2 * self.hccl_buffer * len(there)


NOTHING_OUTSIDE = OutsideTorch()


def communicators(job: Job) -> list[Communicator]:
    """The groups of one die that have collectives on the device; groups of one rank have none.

    Of training: tensors, stages, gradients of dense weights and of experts, norms of gradients over a replica, tokens
    of experts. Of the rollout: tensors, agreements of data-parallel engines, tokens of experts, and the fused exchange,
    which has a communicator of its own (vLLM-Ascend's `mc2` group). Of both: the world, for the reshard.
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
        Communicator("training: norm of gradients", train.tp * train.pp, False),
        Communicator("training: experts", experts, False),
        Communicator("rollout: tensors", rollout.tp, True),
        Communicator("rollout: engines", rollout.dp, True),
        Communicator("rollout: experts", served, True),
        Communicator("rollout: fused exchange of experts", served, True),
    ]
    return [each for each in found if each.ranks > 1]
