"""Run four ranks with the real Qwen2 models: verl's on megatron-core 0.8.0 (TP2 PP2), vLLM-Ascend's (TP2, 2 replicas).

For an untied and a tied model, compare the sharding spec with both models, and the exchange and verl's own path with
upstream's `load_weights`.
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
from transformers import AutoConfig
from verl.models.mcore.registry import get_mcore_weight_converter, hf_to_mcore_config, init_mcore_model
from verl.utils.megatron_utils import per_tensor_generator

from post_training.checkpoint.loading import load_from_huggingface
from post_training.layouts.layout import RolloutPlacement
from post_training.layouts.model_tensors import rollout_tensors, train_tensors
from post_training.layouts.placements import rollout_placement, train_placement
from post_training.reshard.resharder import resharder_for
from tests.post_training.models.model_program import assert_covered, spoil
from tests.verl_patches.features.reshard.load_weights_program import Model, build_rollout, differing, upstream_weights

LAYER_NAMES = {"qkv_layer_name": "self_attention.linear_qkv.", "gate_proj_layer_name": "linear_fc1.weight"}


def check(folder: Path, rank: int) -> dict[str, int]:
    model, hf_config = Model(folder, 0), AutoConfig.from_pretrained(folder)
    live, vllm_config = build_rollout(model, RolloutPlacement(tp=2, dp=1, instances=2), rank)
    config = hf_to_mcore_config(hf_config, torch.bfloat16)
    stages = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    tied = {"share_embeddings_and_output_weights": hf_config.tie_word_embeddings}
    training = init_mcore_model(config, hf_config, *stages, **tied).npu().bfloat16()
    train, rollout = train_placement(config), rollout_placement(vllm_config)
    source, target = train_tensors([training]), rollout_tensors(live)
    shards = model.table.megatron(train, rank)
    counts = {
        "training": assert_covered(source, shards),
        "rollout": assert_covered(target, model.table.vllm_ascend(rollout, rank)),
    }
    load_from_huggingface(folder, source, shards, model.table.shapes, model.table.ignored_in_files)
    expected = upstream_weights(model, live)
    spoil(target)
    resharder = resharder_for(hf_config, [training], live, train, rollout, dist.group.WORLD, 1 << 15)
    counts["buckets"] = resharder.run().buckets
    assert not differing(target, expected)
    spoil(target)
    converter = get_mcore_weight_converter(hf_config, torch.bfloat16)
    live.load_weights(per_tensor_generator([training], hf_config, converter, config, LAYER_NAMES))
    assert not differing(target, expected)
    return counts


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    results = {name: check(folder / name, rank) for name in ("qwen untied", "qwen tied")}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
