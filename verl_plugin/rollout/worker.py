"""The worker class that this project's jobs choose for vLLM-Ascend."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm_ascend.worker.worker import NPUWorker

from verl_plugin.rollout.experts import combine_finite_experts
from verl_plugin.rollout.invariant_products import replace_products
from verl_plugin.rollout.ordered_experts import add_experts_in_order


class RolloutWorker(NPUWorker):
    """Set by `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_cls`."""

    _window_tokens: int | None = None

    def init_device(self) -> None:
        """As upstream, which activates its batch-invariant mode and creates the model runner here."""
        super().init_device()
        if envs.VLLM_BATCH_INVARIANT:
            replace_products()
        self._ask_others = self.model_runner._sync_metadata_across_dp
        self.model_runner._sync_metadata_across_dp = self._metadata_across_dp

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """As upstream. No graph has been captured yet, so all graphs contain the dispatcher that is set here."""
        super().load_model(*arguments, **named)
        combine_finite_experts()
        if envs.VLLM_BATCH_INVARIANT:
            add_experts_in_order()

    def execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        """As upstream; within a sync window no rank asks the others how many tokens they run."""
        self._window_tokens = getattr(scheduler_output, "sync_window_tokens", None)
        try:
            return super().execute_model(scheduler_output, *arguments, **named)
        finally:
            self._window_tokens = None

    def execute_window_dummy(self, tokens: int) -> None:
        """Run a forward without requests within a sync window, in which each rank runs `tokens` tokens."""
        self._window_tokens = tokens
        try:
            self.execute_dummy_batch()
        finally:
            self._window_tokens = None

    def _metadata_across_dp(
        self, num_tokens: int, *arguments: Any, **named: Any
    ) -> tuple[int, torch.Tensor | None, CUDAGraphMode]:
        """Replace the model runner's `_sync_metadata_across_dp`: return tokens, tokens of each rank and graph mode.

        All ranks compute the same from the window's number of tokens: the graph that decodes that many, or that many
        tokens without a graph.
        """
        if self._window_tokens is None:
            return self._ask_others(num_tokens, *arguments, **named)
        runner = self.model_runner
        tokens, mode = runner._pad_for_sequence_parallelism(self._window_tokens), CUDAGraphMode.NONE
        if not runner.model_config.enforce_eager:
            mode, batch = runner.cudagraph_dispatcher.dispatch(num_tokens=tokens, uniform_decode=True)
            tokens = batch.num_tokens
        if num_tokens > tokens:
            raise RuntimeError(f"a forward of {num_tokens} tokens is too large for its sync window of {tokens}")
        return tokens, torch.full((runner.dp_size,), tokens, dtype=torch.int32), mode
