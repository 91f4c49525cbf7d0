"""What this project adds to vLLM-Ascend's workers, through the class that vLLM lets a run choose for them.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls=verl_plugin.rollout.worker.RolloutWorker

Without the key vLLM-Ascend takes its own `NPUWorker`. This project's jobs set it.
"""

WORKER_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls"
WORKER = "verl_plugin.rollout.worker.RolloutWorker"
