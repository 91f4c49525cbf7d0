"""vLLM executors with which the data-parallel engines of a rollout synchronise once per window: see `sync_window`.

    actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=verl_plugin.rollout.executor.WindowedExecutor

An engine runs each of its forwards through its executor, including those without requests. So windows are counted here,
and the scheduler and the workers are told: the scheduler admits no request within a window, and the workers do not
synchronise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from verl_plugin.rollout import WORKER, WORKER_KEY
from verl_plugin.rollout.sync_window import EXECUTOR_KEY, IDLE, Offer, SyncWindow, SyncWindowSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

_log = init_logger("vllm.verl_plugin.rollout")  # vLLM shows what is logged below its own name

WINDOW_TOKENS = "sync_window_tokens"
"""Attribute of a scheduler's output: the number of tokens that each engine runs; absent or None outside a window."""


class _Windowed:
    """Mixin for vLLM's executors."""

    vllm_config: VllmConfig
    sync_window: SyncWindow
    scheduler: Scheduler | None = None

    def _init_executor(self) -> None:
        """As upstream. The group comes first, because the workers copy the list of free ports that it changes."""
        config = self.vllm_config
        settings = SyncWindowSettings.from_additional_config(config.additional_config)
        _reject(config)
        parallel = config.parallel_config
        group = parallel.stateless_init_dp_group()

        def largest(vector: Sequence[int]) -> list[int]:
            shared = torch.tensor(vector, dtype=torch.int64)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
            return [int(value) for value in shared.tolist()]

        _log.info("sync windows of up to %d forwards, %d engines", settings.forwards, parallel.data_parallel_size)
        self.sync_window = SyncWindow(parallel.data_parallel_rank, settings.forwards, largest)
        super()._init_executor()  # type: ignore[misc]  # of the executor
        # The engine creates its scheduler after its executor.
        config.scheduler_config.scheduler_cls = self._scheduler_class(config.scheduler_config.get_scheduler_cls())

    def _scheduler_class(self, upstream: type) -> type:
        """Return a subclass of the engine's scheduler that admits requests only between two windows."""
        executor = self

        class WindowedScheduler(upstream):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                executor.scheduler = self

            def schedule(self, *arguments: Any, **named: Any) -> SchedulerOutput:
                if not executor.sync_window.left or self.pause_state is not PauseState.UNPAUSED:
                    return super().schedule(*arguments, **named)
                self.set_pause_state(PauseState.PAUSED_NEW)
                try:
                    return super().schedule(*arguments, **named)
                finally:
                    self.set_pause_state(PauseState.UNPAUSED)

        return WindowedScheduler

    def execute_model(self, scheduler_output: SchedulerOutput, *arguments: Any, **named: Any) -> Any:
        """As upstream. A call without tokens is no forward: it only tells the workers which requests have ended."""
        if scheduler_output.total_num_scheduled_tokens:
            setattr(scheduler_output, WINDOW_TOKENS, self.sync_window.take(self._offer(scheduler_output)))
        return super().execute_model(scheduler_output, *arguments, **named)  # type: ignore[misc]  # of the executor

    def execute_dummy_batch(self) -> None:
        """Run a forward without requests, as upstream: other engines wait for this one's experts."""
        tokens = self.sync_window.take(IDLE)
        if tokens is None:
            super().execute_dummy_batch()  # type: ignore[misc]  # of the executor
        else:
            self.collective_rpc("execute_window_dummy", args=(tokens,))  # type: ignore[attr-defined]  # of the executor

    def _offer(self, output: SchedulerOutput) -> Offer:
        """Return the engine's local state after it has scheduled a forward."""
        assert self.scheduler is not None
        running, tokens = self.scheduler.running, output.total_num_scheduled_tokens
        single = tokens == len(output.num_scheduled_tokens)
        decodes = single and not any(request.is_prefill_chunk for request in running)
        work = max((request.max_tokens - request.num_output_tokens for request in running), default=1)
        return Offer(max(len(running), tokens), decodes, max(1, work))


class WindowedExecutor(_Windowed, MultiprocExecutor):
    """Replaces `mp`, verl's choice: workers are processes of their own."""


class WindowedInProcess(_Windowed, UniProcExecutor):
    """Replaces `uni`: the only worker is in the engine's process."""


def _reject(config: VllmConfig) -> None:
    """Raise ValueError if engines run forwards that windows do not count, or several tokens of a request at a time."""
    parallel = config.parallel_config
    reasons = {
        "there is only one engine": parallel.data_parallel_size == 1,
        "the model has no experts": not config.model_config.is_moe,
        "pipeline stages are not tested": parallel.pipeline_parallel_size > 1,
        "splitting sequences is not tested": parallel.prefill_context_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        "drafted tokens need forwards of several tokens": config.speculative_config is not None,
        "adapters are not tested": config.lora_config is not None,
        "engines that transfer their KV cache make other forwards": config.kv_transfer_config is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{EXECUTOR_KEY} is invalid: {reason}. Set it to mp.")
    worker = parallel.worker_cls
    worker = resolve_obj_by_qualname(worker) if isinstance(worker, str) else worker
    if not hasattr(worker, "execute_window_dummy"):
        raise ValueError(
            f"{WORKER_KEY}={parallel.worker_cls} is invalid: it does not support sync windows. Set it to {WORKER}."
        )
