"""Suggests settings for a job on FSDP that does not fit: first less memory on the same dies, then more dies."""

from __future__ import annotations

from collections.abc import Iterator

from post_training.plan.fsdp import OPTIMIZER_OFFLOAD, FsdpJob

_NODE = "actor_rollout_ref"
_MOST_DIES = 8
# A share of the die at which an engine still holds a batch of sequences beside its weights.
_LOW_UTILIZATION = 0.3


def suggestions(job: FsdpJob) -> Iterator[tuple[str, ...]]:
    """Yield Hydra overrides to try, smallest change first; the first ones keep the job's dies.

    On the same dies each suggestion adds one to those before it, in this order: offload Adam's moments to the host
    between updates; micro batches of one sequence; shard with FSDP2, which keeps no copy of a reference policy on a
    single die; give the engine less of the die.
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
    """Return the ways to save memory that the job does not use yet, each as overrides."""
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
