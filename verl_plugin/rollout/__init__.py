"""Extends vLLM-Ascend's workers through the worker class that vLLM lets a run choose.

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls=verl_plugin.rollout.worker.RolloutWorker
    actor_rollout_ref.rollout.engine_kwargs.vllm.all2all_backend=flashinfer_all2allv

Without the first key vLLM-Ascend takes its own `NPUWorker`. This project's jobs set both. Upstream sets the second one
itself, but only if the first is not set. With vLLM's default, MoE layers share a sequence over tensor parallel ranks,
which vLLM-Ascend's do not expect: with several data-parallel engines the tokens are then wrong.
"""

WORKER_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls"
WORKER = "verl_plugin.rollout.worker.RolloutWorker"
BACKEND_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.all2all_backend"
BACKEND = "flashinfer_all2allv"
"""The value that vLLM-Ascend 0.23 sets if a run names no worker; see above."""
