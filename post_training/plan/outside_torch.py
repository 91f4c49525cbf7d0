"""Device memory that torch does not count: buffers of HCCL's communicators, and CANN's memory of a process."""

from __future__ import annotations

from dataclasses import dataclass

from post_training.plan.job import Job

# With fewer ranks vLLM-Ascend's `get_fused_moe_state` chooses another way to exchange tokens.
_LEAST_OF_FUSED_EXCHANGE = 16


@dataclass(frozen=True)
class Communicator:
    """A group of a die whose collectives run on the device.

    Attributes:
        early: it exists already when the engine measures free memory.
        only_sends: its two ranks only send to each other.
    """

    name: str
    ranks: int
    early: bool
    only_sends: bool = False


@dataclass(frozen=True)
class OutsideTorch:
    """Sizes of the memory that torch does not count, in bytes.

    A communicator has two buffers, one to send and one to receive ("HCCL_BUFFSIZE", CANN's environment variables).
    All sizes are 0 on the emulated NPU unless it is configured to count them.

    Attributes:
        hccl_buffer: HCCL_BUFFSIZE.
        cann: memory of a process that has only opened a die.
        p2p_buffer: P2P_HCCL_BUFFSIZE, which torch_npu uses for communicators of two ranks that only send to each other.
    """

    hccl_buffer: int = 0
    cann: int = 0
    p2p_buffer: int = 0

    def at_most(self, job: Job) -> int:
        """Return the bytes after every group's first collective, at which torch_npu creates its communicator."""
        return self._bytes(communicators(job))

    def when_the_engine_is_built(self, job: Job) -> int:
        """Return the bytes when vLLM-Ascend measures free memory, which is before the first update."""
        return self._bytes([each for each in communicators(job) if each.early])

    def _bytes(self, there: list[Communicator]) -> int:
        return self.cann + 2 * sum(self.p2p_buffer if each.only_sends else self.hccl_buffer for each in there)


NOTHING_OUTSIDE = OutsideTorch()


def communicators(job: Job) -> list[Communicator]:
    """Return the groups of one die that have collectives on the device; groups of one rank have none.

    - Training: tensors, stages, gradients of dense weights and of experts, tokens of experts, and two to send to other
      stages, since a stage has two neighbours, and with two stages Megatron uses another group for one direction.
      Ranks that share sequences have a group, and send to their neighbours in a ring; replicas then have one of their
      own, beside that of the gradients.
    - Rollout: tensors, synchronisation of data-parallel engines, tokens of experts, and the fused exchange, which has
      a communicator of its own (vLLM-Ascend's `mc2` group).
    - Both: the world, for the reshard and, with the distributed optimizer, for gradient norms.
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
        Communicator("training: sequences", job.context, False),
        Communicator("training: replicas", train.dp // job.context if job.context > 1 else 1, False),
        Communicator("rollout: tensors", rollout.tp, True),
        Communicator("rollout: engines", rollout.dp, True),
        Communicator("rollout: experts", served, True),
        Communicator("rollout: fused exchange of experts", served if served >= _LEAST_OF_FUSED_EXCHANGE else 1, True),
    ]
    neighbours = ("one", "other") if train.pp > 1 else ()
    found += [Communicator(f"training: {side} neighbour in stages", 2, False, only_sends=True) for side in neighbours]
    ring = ("one", "other")[: min(job.context - 1, 2)]
    found += [Communicator(f"training: {side} neighbour in sequences", 2, False, only_sends=True) for side in ring]
    return [each for each in found if each.ranks > 1]
