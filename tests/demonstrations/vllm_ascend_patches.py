"""Effects of the patches of vLLM-Ascend."""

import os
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from unittest import mock

import torch

from tests.demonstrations import Upstream, demonstrates
from tests.demonstrations.vllm_patches import module_with
from verl_patches.features import settings
from verl_patches.features.compatibility.feature import IMAGES, SLEEP_MODE
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.dp_sync.sync_window import ReducedState
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.residency.feature import RESIDENCY, ResidencySettings
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL, RolloutSettings
from verl_patches.features.rollout_rebalance.feature import ROLLOUT_REBALANCE
from verl_patches.features.router_balance.feature import ROUTER_BALANCE
from verl_patches.features.router_precision.feature import ROUTER_PRECISION

RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"


@demonstrates(f"{RUNNER}._get_forward_metadata_across_dp", DP_SYNC)
def the_next_forward_is_agreed_on_the_device(body):
    runner = SimpleNamespace(
        dp_size=2, dp_rank=0, is_kv_producer=False, is_kv_consumer=False, torchair_graph_enabled=False
    )
    agreed = ReducedState((4, 8), (3, 7), with_prefill=False, two_batches=True, steps=1, wasted=0)
    loop = SimpleNamespace(forward=lambda mine, stand_in, graph_sizes: agreed)
    with (
        mock.patch("verl_patches.features.dp_sync.decode_loop.going", return_value=loop),
        module_with("vllm.distributed.parallel_state", get_dp_group=None),
    ):
        return str(body(Upstream(), runner, 4, 3, False, True))


@demonstrates(f"{RUNNER}._update_states", ROLLOUT_REBALANCE)
def random_numbers_of_requests_that_arrived_go_on(body):
    found = "verl_patches.features.rollout_rebalance.migration.restore_generators"
    with mock.patch(found) as restore:
        body(Upstream(), SimpleNamespace(), "scheduled")
    return restore.call_count


@demonstrates(f"{RUNNER}._update_states", REQUEST_NOISE)
def a_part_of_a_prompt_has_no_generator(body):
    states = {
        name: SimpleNamespace(num_computed_tokens=0, num_tokens=5, generator=f"of {name}") for name in ("part", "whole")
    }
    batch = SimpleNamespace(req_id_to_index={"part": 0, "whole": 1}, generators={0: "of part"})
    scheduled = SimpleNamespace(num_scheduled_tokens={"part": 3, "whole": 5})
    body(Upstream(), SimpleNamespace(input_batch=batch, requests=states), scheduled)
    return batch.generators


@demonstrates(f"{RUNNER}.execute_model", REQUEST_NOISE)
def a_step_leaves_the_devices_random_numbers_alone(body):
    states = ["before"]
    device = SimpleNamespace(get_rng_state=lambda: states[-1], set_rng_state=states.append)
    with mock.patch("torch.npu", device, create=True):
        body(lambda runner, scheduled: states.append("drawn"), SimpleNamespace(), "scheduled")
    return states


@demonstrates(f"{RUNNER}.load_model", RESIDENCY)
def loaded_weights_are_moved_to_memory_with_addresses_that_stay(body):
    chosen = settings.OverlaySettings(residency=ResidencySettings(rollout_addresses="reserved"))
    moved = "verl_patches.features.residency.reserved.reserve_weights"
    with mock.patch("verl_patches.features.settings._current", chosen), mock.patch(moved) as reserve:
        body(Upstream(), SimpleNamespace())
    return reserve.call_count


@demonstrates(f"{RUNNER}.initialize_kv_cache", RESIDENCY)
def the_caches_configuration_is_kept(body):
    runner = SimpleNamespace()
    body(Upstream(), runner, "configuration")
    return vars(runner)


class ExpertExchange(Enum):
    """The two of vLLM-Ascend's exchange methods that matter here."""

    All2All = 1
    MC2 = 2


@demonstrates("vllm_ascend.ascend_forward_context:get_fused_moe_state", ROLLOUT_EXPERT_PARALLEL)
def a_graph_decodes_through_the_fused_exchange_on_few_dies(body):
    graph = SimpleNamespace(torchair_graph_config=SimpleNamespace(enabled=True))
    spread = replace(settings.current(), rollout=RolloutSettings(expert_parallel_size=8))
    with module_with("vllm_ascend.ascend_config", get_ascend_config=lambda: graph):
        with mock.patch.object(settings, "current", return_value=spread):
            return [body(lambda *call: ExpertExchange.All2All, 8, prefill).name for prefill in (False, True)]


@demonstrates(f"{RUNNER}._get_torchair_lazy_compiled_model", RESIDENCY)
def a_graph_reads_the_addresses_of_its_weights_at_every_run(body):
    found = []

    def upstream(runner, batch_size):
        import torchair

        config = torchair.CompilerConfig()
        config.experimental_config.frozen_parameter = True
        torchair.get_npu_backend(compiler_config=config)
        found.append(config.experimental_config.frozen_parameter.value)

    body(upstream, SimpleNamespace(), 1)
    return found


@demonstrates("vllm_ascend.ops.fused_moe:AscendUnquantizedFusedMoEMethod.__init__", ROUTER_BALANCE)
def the_router_has_no_say(body):
    method = SimpleNamespace(apply=lambda router_logits, **options: router_logits.topk(2).indices.tolist())
    body(lambda self, moe: None, method, moe=None)
    return method.apply(router_logits=torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), top_k=2)


def _bfloat16_router(self, **options):
    """Build a block as vLLM-Ascend does for a bfloat16 model, with a bias like those of DeepSeek-V3."""
    self.gate = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    bias = torch.nn.Parameter(torch.tensor([4.9876, 5.0123], dtype=torch.bfloat16), requires_grad=False)
    self.gate.e_score_correction_bias = bias


@demonstrates("vllm_ascend.models.deepseek_v2:CustomDeepseekV2MoE.__init__", ROUTER_PRECISION)
def the_bias_of_a_router_is_float32(body):
    block = SimpleNamespace()
    body(_bfloat16_router, block, "configuration")
    return str(block.gate.e_score_correction_bias.dtype)


@demonstrates("vllm_ascend.ops.fused_moe:AscendSparseMoeBlock.__init__", ROUTER_PRECISION)
def a_router_scores_in_float32(body):
    block = SimpleNamespace()
    body(_bfloat16_router, block, "configuration")
    return type(getattr(block.gate, "quant_method", None)).__name__


@demonstrates("vllm_ascend.device_allocator.camem:CaMemAllocator.sleep", SLEEP_MODE)
def queued_work_is_waited_for_before_memory_goes(body):
    events = []
    with mock.patch("torch.npu", SimpleNamespace(synchronize=lambda: events.append("wait")), create=True):
        body(lambda allocator, tags: events.append(f"unmap all but {tags}"), SimpleNamespace(), ("weights",))
    return events


@demonstrates("vllm_ascend.models:register_model", IMAGES)
def the_model_that_takes_new_weights_is_registered(body):
    found = []
    with mock.patch.dict(os.environ, {"USE_OPTIMIZED_MODEL": "1"}):
        body(lambda: found.append(os.environ["USE_OPTIMIZED_MODEL"]))
        return [*found, os.environ["USE_OPTIMIZED_MODEL"]]
