"""verl's own `main_ppo`, forked like its Ray workers: `python -m rehearsal.stack_2026.training key=value ...`.

It gives the same result as `python -m verl.trainer.main_ppo` with the same arguments, but starts sooner on a small
machine without an NPU: the entry point and the processes of Ray and of vLLM, ten with one die, share one import of
everything. verl's key `ray_kwargs.ray_init.runtime_env.py_executable` names the program that Ray starts as a worker. In
those processes `few_cores` changes how vLLM and verl wait and hand samples on, and nothing that they compute.
"""

import runpy
import sys

from post_training.overrides import quoted
from post_training.processes.ray_helpers import without_helpers
from rehearsal.prefork import set_up_workers_quickly, start_template

MODULES = (
    "torch",
    "transformers",
    "rehearsal.prefork.ray_ids",
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.executor.multiproc_executor",
    "vllm_ascend.worker.worker",
    "verl.trainer.ppo.v1",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.experimental.agent_loop",
    "verl_plugin.onpolicy.trainer",
    "rehearsal.stack_2026.few_cores",
)
MEGATRON = ("mbridge", "megatron.core.models.gpt", "megatron.core.optimizer")
KEY = "ray_kwargs.ray_init.runtime_env.py_executable"
_DRIVER = "from rehearsal.stack_2026.training import drive; drive()"


def main(arguments: list[str]) -> int:
    """Run verl's entry point and its workers as forks of one process; returns the entry point's exit code."""
    trains_with_megatron = any("megatron" in argument for argument in arguments)
    template = start_template((*MODULES, *MEGATRON) if trains_with_megatron else MODULES)
    try:
        return template.run(_DRIVER, [*arguments, f"{KEY}={quoted(template.py_executable)}"])
    finally:
        template.close()


def drive() -> None:
    """Run verl's entry point in this process, with its arguments; it exits as the entry point does."""
    sys.argv[0] = "main_ppo"
    try:
        set_up_workers_quickly()
        with without_helpers():
            runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
    finally:
        import ray

        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
