"""Error messages of one sentence for the exceptions that end a run."""

from __future__ import annotations

from post_training.start_status import Cause

KNOWN_FAILURES: tuple[tuple[str, Cause, str], ...] = (
    # Ray's message about host memory contains "the out of memory issue" too, so it comes before the dies'.
    (
        "exceeds the memory usage threshold",
        "host_memory",
        "a node ran out of host memory, and Ray ended a worker. Run less beside the job, lower "
        "ray_init.object_store_memory, or keep less on the host (param_offload, optimizer_offload, swap_optimizer)",
    ),
    (
        "No available memory for the cache blocks",
        "bad_configuration",
        "no device memory is left for the KV cache. Raise actor_rollout_ref.rollout.gpu_memory_utilization, give the "
        "dies more memory, or use more dies",
    ),
    (
        "out of memory",
        "OOM",
        "a die ran out of device memory. Give the dies more memory, use more dies, or lower "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu and actor_rollout_ref.rollout.gpu_memory_utilization",
    ),
)


def describe_failure(error: BaseException) -> tuple[str, Cause | None]:
    """Describe an exception of the run in one sentence, with a remedy and a cause if it is a known one."""
    text = str(error)
    for sign, cause, sentence in KNOWN_FAILURES:
        if sign.lower() in text.lower():
            return sentence, cause
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__), None
