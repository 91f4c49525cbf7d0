"""Run four ranks with the real models on the device: our Megatron DeepSeek-V3 (TP2 PP2), vLLM-Ascend's (TP2 DP2 EP4).

The sharding specs are compared with both models, and the exchange with upstream's own `load_weights`.
"""

import json
import os
from pathlib import Path

import verl_patches.prelude_patch  # noqa: F401  (before every upstream package)

# isort: split
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
import verl.workers.megatron_workers  # noqa: F401  (applies the overlay's bridge to megatron-core 0.8.0)
from megatron.core import parallel_state, tensor_parallel
from safetensors.torch import load_file
from transformers import AutoConfig
from verl.utils.vllm_utils import patch_vllm_moe_model_weight_loader
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state as vllm_parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins
from vllm_ascend.ascend_config import init_ascend_config
from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
from vllm_ascend.models.deepseek_v2 import CustomDeepseekV3ForCausalLM

from post_training.checkpoint.loading import load_from_huggingface
from post_training.layouts.layout import EXPERT_MARK
from post_training.layouts.model_tensors import rollout_tensors, train_tensors
from post_training.layouts.placements import rollout_placement, train_placement
from post_training.models.deepseek_v3 import DeepseekV3Shape, hf_shapes, megatron, vllm_ascend
from post_training.models.megatron.deepseek_v3_config import deepseek_v3_config_from_huggingface
from post_training.models.megatron.deepseek_v3_model import build_deepseek_v3
from post_training.reshard.mla_refresh import refresh_absorbed_weights
from post_training.reshard.per_tensor import full_tensors
from post_training.reshard.resharder import Resharder, resharder_for
from tests.post_training.layouts.reference import same_bits

TP, PP, WORLD = 2, 2, 4
LAYERS_BY_STAGE = [2, 1]

# vLLM inspects a model that it only knows by name in a separate process, which imports everything again.
load_general_plugins()
ModelRegistry.register_model("DeepseekV3ForCausalLM", CustomDeepseekV3ForCausalLM)

State = dict[str, torch.Tensor]


def start_rollout(folder: Path, rank: int) -> tuple[torch.nn.Module, VllmConfig]:
    """Build vLLM-Ascend's model as an engine does, without scheduler and KV cache."""
    os.environ |= {"VLLM_DP_SIZE": str(WORLD // TP), "VLLM_DP_RANK": str(rank // TP), "VLLM_DP_MASTER_IP": "127.0.0.1"}
    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        tensor_parallel_size=TP,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=True,
    ).create_engine_config()
    init_ascend_config(config)
    with set_current_vllm_config(config):
        vllm_parallel_state.init_distributed_environment(TP, rank % TP, "env://", rank, "hccl")
        vllm_parallel_state.ensure_model_parallel_initialized(TP, 1)
        init_ascend_model_parallel(config.parallel_config.expert_parallel_size, config.parallel_config.lmhead_tp_size)
        return get_model(vllm_config=config), config


def start_training(hf_config: object) -> torch.nn.Module:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP, pipeline_model_parallel_size=PP)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = deepseek_v3_config_from_huggingface(hf_config, torch.bfloat16, num_layer_list=LAYERS_BY_STAGE)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return build_deepseek_v3(config, hf_config, first, last).npu()


def assert_covered(tensors: State, shards: list) -> int:
    """Check that the layout names every weight of the model and covers each element exactly once."""
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in tensors.items()}
    for shard in shards:
        shard.locate(tensors)
        shard.locate(seen).add_(1)
    uncovered = [name for name, count in seen.items() if not bool((count == 1).all())]
    assert not uncovered, uncovered
    return len(tensors)


def snapshot(tensors: State) -> State:
    return {name: tensor.data.cpu().clone() for name, tensor in tensors.items()}


def spoil(tensors: State) -> None:
    for tensor in tensors.values():
        tensor.data.fill_(torch.nan)


def assert_same(tensors: State, expected: State) -> None:
    different = [name for name, tensor in tensors.items() if not same_bits(tensor.data.cpu(), expected[name])]
    assert not different, different


def absorbed(model: torch.nn.Module) -> list:
    return [module.impl for module in model.modules() if hasattr(getattr(module, "impl", None), "W_UK_T")]


def check_absorbed_weights(model: torch.nn.Module, kept: list[State]) -> int:
    """Check that resharding leaves them stale, and that a refresh makes them upstream's, at the same addresses."""
    layers = absorbed(model)
    addresses = [(impl.W_UK_T.data_ptr(), impl.W_UV.data_ptr()) for impl in layers]
    assert not any(same_bits(impl.W_UK_T.cpu(), old["key"]) for impl, old in zip(layers, kept, strict=True))
    assert refresh_absorbed_weights(model) == len(layers)
    assert addresses == [(impl.W_UK_T.data_ptr(), impl.W_UV.data_ptr()) for impl in layers]
    for impl, old in zip(layers, kept, strict=True):
        assert same_bits(impl.W_UK_T.cpu(), old["key"])
        assert same_bits(impl.W_UV.cpu(), old["value"])
    return len(layers)


def upstream_state(model: torch.nn.Module, weights: object) -> tuple[State, list[State]]:
    """Return the tensors that upstream's own load_weights and weight processing make of `weights`."""
    model.load_weights(weights)
    for impl in absorbed(model):
        impl.process_weights_after_loading(torch.bfloat16)
    derived = [{"key": impl.W_UK_T.cpu().clone(), "value": impl.W_UV.cpu().clone()} for impl in absorbed(model)]
    return snapshot(rollout_tensors(model)), derived


def check_exchange(resharder: Resharder, target: State, expected: State) -> dict[str, int]:
    spoil(target)
    report = resharder.run()
    assert_same(target, expected)
    assert resharder.verify() == []
    served = sum(tensor.numel() * 2 for name, tensor in target.items() if EXPERT_MARK in name)
    assert 0 < report.expert_bytes_received <= served
    again = resharder.run()
    assert (again.collectives, again.object_collectives) == (again.buckets + 1, 0)
    return {"received": report.bytes_received, "experts": report.expert_bytes_received, "buckets": again.buckets}


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    hf_config = AutoConfig.from_pretrained(folder)
    shape = DeepseekV3Shape.from_config(hf_config)
    model, vllm_config = start_rollout(folder, rank)
    training = start_training(hf_config)
    train, rollout = train_placement(training.config), rollout_placement(vllm_config)
    source, target = train_tensors([training]), rollout_tensors(model)
    results = {
        "training tensors": assert_covered(source, megatron(shape, train, rank)),
        "rollout tensors": assert_covered(target, vllm_ascend(shape, rollout, rank)),
    }
    load_from_huggingface(folder, source, megatron(shape, train, rank), hf_shapes(shape))
    patch_vllm_moe_model_weight_loader(model)
    files = load_file(folder / "model.safetensors")
    expected, derived = upstream_state(model, ((name, value.npu()) for name, value in files.items()))
    for impl in absorbed(model):
        impl.W_UK_T.zero_()
        impl.W_UV.zero_()
    resharder = resharder_for(hf_config, [training], model, train, rollout, dist.group.WORLD, 1 << 17)
    results["exchange"] = check_exchange(resharder, target, expected)
    results["absorbed"] = check_absorbed_weights(model, derived)
    layouts = [megatron(shape, train, other) for other in range(WORLD)]
    device = torch.device("npu", rank)
    spoil(target)
    whole = full_tensors(source, layouts, hf_shapes(shape), dist.group.WORLD, device)
    for name, value in upstream_state(model, whole)[0].items():
        assert same_bits(value, expected[name]), name
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
