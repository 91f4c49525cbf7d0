"""A training whose Ray workers are forked: `python -m rehearsal.training --config-name rehearsal key=value ...`.

It gives the same result as `python -m verl_patches.trainer.main_ppo` with the same arguments, but starts sooner on a
small machine without an NPU.
"""

import sys

from omegaconf import DictConfig

from rehearsal.prefork import Template, set_up_workers_quickly, start_template
from verl_patches.trainer import main_ppo
from verl_patches.trainer.configuration_checks.backends import Backend, backend_of

# verl's workers of each back-end, and what they import when they build the rollout.
WORKERS: dict[Backend, tuple[str, ...]] = {
    "megatron": ("verl.workers.megatron_workers", "verl.workers.sharding_manager.megatron_vllm"),
    "fsdp": ("verl.workers.fsdp_workers", "verl.workers.sharding_manager.fsdp_vllm"),
}


def modules_of(config: DictConfig) -> tuple[str, ...]:
    """Return the modules that workers find imported: the overlay first, so that it sees every later import."""
    return "verl_patches.prelude_patch", "torch", *WORKERS[backend_of(config)], "vllm", "vllm_ascend.worker.worker_v1"


def start_workers(config: DictConfig) -> Template:
    """The process that Ray's workers are forked from."""
    set_up_workers_quickly()
    return start_template(modules_of(config))


if __name__ == "__main__":
    sys.exit(main_ppo.main(start_workers=start_workers))
