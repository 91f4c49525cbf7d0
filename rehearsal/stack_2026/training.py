"""verl's own `main_ppo`, whose Ray workers are forked: `python -m rehearsal.stack_2026.training key=value ...`.

It gives the same result as `python -m verl.trainer.main_ppo` with the same arguments, but starts sooner on a small
machine without an NPU: the processes of Ray and of vLLM, nine with one die, share one import of everything. verl's key
`ray_kwargs.ray_init.runtime_env.py_executable` names the program that Ray starts as a worker. In those processes
`few_cores` changes how vLLM and verl wait and hand samples on, and nothing that they compute.
"""

import runpy
import sys

from post_training.overrides import quoted
from rehearsal.prefork import start_template

# Modules that do not import Ray are imported beside the driver's own imports; the rest with the first worker.
EARLY = ("torch", "transformers")
LATE = (
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


def main(arguments: list[str]) -> None:
    """Run verl's entry point with forked workers; the process ends as the entry point does."""
    late = (*LATE, *MEGATRON) if any("megatron" in argument for argument in arguments) else LATE
    template = start_template(late, early=EARLY)
    sys.argv = ["main_ppo", *arguments, f"{KEY}={quoted(template.py_executable)}"]
    try:
        runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
    finally:
        import ray

        ray.shutdown()
        template.close()


if __name__ == "__main__":
    main(sys.argv[1:])
