"""Settings with which a job on FSDP that does not fit may fit: fewer bytes on the same dies first, then more dies."""

from __future__ import annotations

from collections.abc import Iterator

from post_training.plan.fsdp import OPTIMIZER_OFFLOAD, FsdpJob

_NODE = "actor_rollout_ref"
_MOST_DIES = 8
# A share of the die at which an engine still holds a batch of sequences beside its weights.
_LOW_UTILIZATION = 0.3


def suggestions(job: FsdpJob) -> Iterator[tuple[str, ...]]:
    """Hydra overrides to try, from those that change least on; the first ones keep the dies of the job.

    On the same dies, in this order and each with those before it: Adam's moments go to the host between updates, micro
    batches hold one sequence, FSDP2 shards, which keeps no copy of a reference policy on a die that is alone, and the
    engine takes less of the die.
    """
    steps = _savings(job)
    for count in range(1, len(steps) + 1):
        yield tuple(setting for step in steps[:count] for setting in step)
    dies = 2 * job.dies
    while dies <= _MOST_DIES:
        for count in range(len(steps) + 1):
            yield (f"trainer.n_gpus_per_node={dies}", *(setting for step in steps[:count] for setting in step))
        dies *= 2


def _savings(job: FsdpJob) -> list[tuple[str, ...]]:
    """Ways to save memory that the job does not use yet, each as overrides."""
    micro = (
        ("actor.ppo_micro_batch_size_per_gpu", job.micro_update),
        ("rollout.log_prob_micro_batch_size_per_gpu", job.micro_old),
        ("ref.log_prob_micro_batch_size_per_gpu", job.micro_reference),
    )
    found = [
        () if job.away_optimizer else (OPTIMIZER_OFFLOAD,),
        tuple(f"{_NODE}.{key}=1" for key, sequences in micro if sequences > 1),
        () if job.by_rows else (f"{_NODE}.actor.strategy=fsdp2",),
        (f"{_NODE}.rollout.gpu_memory_utilization={_LOW_UTILIZATION}",) if job.utilization > _LOW_UTILIZATION else (),
    ]
    return [each for each in found if each]
