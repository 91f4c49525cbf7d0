"""What this project adds to vLLM-Ascend's workers, through the class that vLLM lets a run choose for them.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls=verl_plugin.rollout.worker.RolloutWorker
    actor_rollout_ref.rollout.engine_kwargs.vllm.all2all_backend=flashinfer_all2allv

Without the first key vLLM-Ascend takes its own `NPUWorker`. This project's jobs set both. Upstream sets the second one
itself, but only where the first is not set. With vLLM's default, layers of experts share a sequence over tensor
parallel ranks, which vLLM-Ascend's do not expect: with several data-parallel engines the tokens are then wrong.
"""

WORKER_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls"
WORKER = "verl_plugin.rollout.worker.RolloutWorker"
BACKEND_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.all2all_backend"
BACKEND = "flashinfer_all2allv"
"""What vLLM-Ascend 0.23 sets where a run names no worker; see above."""
