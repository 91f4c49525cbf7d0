"""The class of vLLM-Ascend's workers in this project's jobs."""

from __future__ import annotations

from typing import Any

from vllm_ascend.worker.worker import NPUWorker

from verl_plugin.rollout.experts import combine_finite_experts


class RolloutWorker(NPUWorker):
    """Set by `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls`."""

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """As upstream. No graph has been captured yet, so all of them run what is registered here."""
        super().load_model(*arguments, **named)
        combine_finite_experts()
