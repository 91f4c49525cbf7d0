"""vLLM-Ascend's model runner: ranks agree on the next forward on the device, the KV cache can be created again, and
weights that leave the device return to the same addresses, or to a graph that looks their addresses up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.residency.feature import RESIDENCY
from verl_patches.features.rollout_rebalance.feature import ROLLOUT_REBALANCE

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"


@wrap(
    f"{_RUNNER}._get_forward_metadata_across_dp",
    feature=DP_SYNC,
    evidence="executed",
    why="it all-reduces over gloo on the host before every forward: 10 to 14 ms on 128 cards",
    upstream="https://github.com/vllm-project/vllm-ascend/pull/2582",
    remove_when="vLLM-Ascend exchanges forward metadata on the device group",
    relies_on=["vllm.distributed.parallel_state:get_dp_group"],
)
def get_forward_metadata_across_dp(
    upstream: Callable[..., tuple[int, torch.Tensor | None, bool, bool]],
    self: NPUModelRunner,
    maybe_padded_num_tokens: int,
    num_tokens: int,
    with_prefill: bool,
    enable_dbo: bool,
) -> tuple[int, torch.Tensor | None, bool, bool]:
    # Prefill and decode on separate machines decide by themselves; that is not this project's rollout.
    apart = self.is_kv_producer or self.is_kv_consumer
    if self.dp_size == 1 or apart:
        return upstream(self, maybe_padded_num_tokens, num_tokens, with_prefill, enable_dbo)
    from vllm.distributed.parallel_state import get_dp_group

    from verl_patches.features.dp_sync import decode_loop
    from verl_patches.features.dp_sync.agreement import forward_of_rank
    from verl_patches.features.dp_sync.sync_window import LocalState

    mine, loop = LocalState(maybe_padded_num_tokens, num_tokens, with_prefill, enable_dbo), decode_loop.going()
    in_graphs = self.torchair_graph_enabled
    if loop:
        sizes = self.torchair_graph_batch_sizes if in_graphs else ()
        agreed = loop.forward(mine, lambda: self._dummy_run(1), sizes)
    else:
        agreed = decode_loop.agree_once(mine, get_dp_group())
    return forward_of_rank(mine, agreed, self.dp_rank, fixed_sizes=in_graphs)


@wrap(
    f"{_RUNNER}._update_states",
    feature=ROLLOUT_REBALANCE,
    why="a request that arrives from another engine continues in its random numbers where it was",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM moves requests between data-parallel engines while they decode",
)
def update_states(upstream: Callable[..., None], self: NPUModelRunner, scheduler_output: SchedulerOutput) -> None:
    from verl_patches.features.rollout_rebalance.migration import restore_generators

    upstream(self, scheduler_output)
    restore_generators(self, scheduler_output)


@wrap(
    f"{_RUNNER}._update_states",
    feature=REQUEST_NOISE,
    relies_on=["vllm.v1.sample.ops.topk_topp_sampler:random_sample"],
    why="a token is drawn for every part of a prompt, and its random numbers are given back by a guess: 4 places of "
    "torch_npu's generator, which takes 12",
    upstream="https://github.com/vllm-project/vllm/pull/10097",
    remove_when="vLLM-Ascend draws no token for a part of a prompt",
)
def update_states_and_generators(
    upstream: Callable[..., None], self: NPUModelRunner, scheduler_output: SchedulerOutput
) -> None:
    from verl_patches.features.request_noise.generators import give_generators

    upstream(self, scheduler_output)
    give_generators(self, scheduler_output.num_scheduled_tokens)


@wrap(
    f"{_RUNNER}.execute_model",
    feature=REQUEST_NOISE,
    why="a part of a prompt draws from the device's random numbers, from which later requests get their seeds",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM-Ascend draws no token for a part of a prompt",
)
def execute_model(
    upstream: Callable[..., ModelRunnerOutput | torch.Tensor],
    self: NPUModelRunner,
    scheduler_output: SchedulerOutput,
    *args: Any,
) -> ModelRunnerOutput | torch.Tensor:
    from verl_patches.features.request_noise.generators import parts_leave_no_trace

    with parts_leave_no_trace():
        return upstream(self, scheduler_output, *args)


@wrap(
    f"{_RUNNER}.load_model",
    feature=RESIDENCY,
    evidence="executed",
    relies_on=["vllm_ascend.device_allocator.camem:CaMemAllocator"],
    why="weights that return to their old addresses must be in memory that can be unmapped, before a graph is "
    "captured with them; an ACL graph needs such weights",
    upstream="not forwarded: vLLM-Ascend does so in its sleep mode, which takes over what leaves the device and when",
    remove_when="vLLM-Ascend lets a caller map and unmap weights without its sleep mode",
)
def load_model(upstream: Callable[..., None], self: NPUModelRunner) -> None:
    from verl_patches.features.residency.graph import reject_captured_graphs

    reserves = RESIDENCY.current().reserves_addresses
    if not reserves:
        reject_captured_graphs(self)
    upstream(self)
    if reserves:
        from verl_patches.features.residency.reserved import reserve_weights

        reserve_weights(self)


@wrap(
    f"{_RUNNER}.initialize_kv_cache",
    feature=RESIDENCY,
    evidence="executed",
    relies_on=["vllm.v1.utils:bind_kv_cache"],
    why="the cache is freed while training runs and created again for every rollout, with the configuration of "
    "the first",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM-Ascend can free and create its KV cache without sleep mode",
)
def initialize_kv_cache(upstream: Callable[..., None], self: NPUModelRunner, kv_cache_config: KVCacheConfig) -> None:
    from verl_patches.features.residency.kv_cache import CONFIGURATION

    setattr(self, CONFIGURATION, kv_cache_config)
    upstream(self, kv_cache_config)


@wrap(
    f"{_RUNNER}._get_torchair_lazy_compiled_model",
    feature=RESIDENCY,
    why="it lets a graph keep the addresses of the weights, which change when they leave the device and return",
    upstream="not forwarded: vLLM-Ascend's own sleep mode keeps the addresses",
    remove_when="residency.rollout_addresses=reserved is known to work on NPUs, and is the only way left",
)
def get_torchair_lazy_compiled_model(
    upstream: Callable[..., Callable[..., Any]], self: NPUModelRunner, batch_size: int
) -> Callable[..., Any]:
    from verl_patches.features.residency.graph import weights_that_move

    if RESIDENCY.current().reserves_addresses:
        return upstream(self, batch_size)
    with weights_that_move():
        return upstream(self, batch_size)
