"""Ranks that build vLLM-Ascend's real models in one placement after another and compare reshards with upstream.

For every rollout placement, upstream's own `load_weights` defines the expected weights; several training placements
are then resharded into the same live model with real collectives, and every byte is compared. The folder holds
`request.json` with the keys of `Request`.
"""

import dataclasses
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import verl_patches.prelude_patch  # noqa: F401  (before every upstream package)

# isort: split
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
import verl.workers.megatron_workers  # noqa: F401  (applies the overlay's bridge to megatron-core 0.8.0)
from transformers import AutoConfig, PretrainedConfig
from verl.utils.vllm_utils import patch_vllm_moe_model_weight_loader
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state as vllm_parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins
from vllm_ascend.ascend_config import init_ascend_config
from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel

from post_training.layouts.grouped_query import GroupedQueryShape
from post_training.layouts.layout import RolloutPlacement, Shard, Table, TrainPlacement
from post_training.layouts.model_tensors import rollout_tensors
from post_training.layouts.placements import rollout_placement
from post_training.models.deepseek_v3 import DeepseekV3Shape
from post_training.models.families import families, table_for
from post_training.reshard.resharder import Resharder
from tests.post_training.layouts import grouped_query_reference, reference
from tests.post_training.layouts.drawn_placements import draw_train_placement, rollout_placements
from tests.post_training.layouts.reference import State, same_bits

# vLLM inspects a model that it knows by name in a separate process, which would import everything again.
load_general_plugins()
for _family in families():
    ModelRegistry.register_model(_family.architecture, ModelRegistry.models[_family.architecture].load_model_cls())


@dataclasses.dataclass(frozen=True)
class Request:
    """The contents of `request.json`.

    Attributes:
        models: folders with a config.json.
        train_layouts: number of training layouts for each rollout placement.
        every: take only every n-th rollout placement.
    """

    models: list[str]
    train_layouts: int
    every: int


class Model:
    """A model's sizes, random weights and naively computed training states."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        config = AutoConfig.from_pretrained(folder)
        self.table: Table = table_for(config)
        if config.architectures == ["DeepseekV3ForCausalLM"]:
            self.shape, self.naive = DeepseekV3Shape.from_config(config), reference
            self.tensor_sizes = [1, 2, 4, 8]
        else:
            self.shape, self.naive = grouped_query_shape(config, self.table), grouped_query_reference
            self.tensor_sizes = [size for size in (1, 2, 4, 8) if self.shape.kv_heads % size == 0]
        self.weights: State = self.naive.full_weights(self.shape, torch.bfloat16, seed)
        # As published for DeepSeek-V3's router biases: float32, near 5, and mostly not representable in bfloat16.
        drawn = torch.Generator().manual_seed(seed)
        for name, value in self.weights.items():
            if name.endswith("e_score_correction_bias"):
                self.weights[name] = 5 + torch.rand(value.shape, generator=drawn)

    def rollout_placements(self, world: int) -> list[RolloutPlacement]:
        """Return the placements that differ for this model; expert placements do not matter for a dense one."""
        if self.naive is not reference and self.has_experts:
            # There is no shared expert to replicate.
            return [p for p in rollout_placements(world) if not p.shared_expert_replicated]
        return [p for p in rollout_placements(world) if p.ep == 1 or self.has_experts]

    @property
    def has_experts(self) -> bool:
        return bool(self.shape.experts)

    def train_state(self, placement: TrainPlacement, rank: int) -> State:
        state = self.naive.megatron_state(self.weights, self.shape, placement, rank)
        return {name: value.npu() for name, value in state.items()}


def grouped_query_shape(config: PretrainedConfig, table: Table) -> GroupedQueryShape:
    """Return the sizes of a model with the weights of this sharding spec."""
    attention = "model.layers.0.self_attn"
    return GroupedQueryShape.from_config(
        config,
        bias=f"{attention}.q_proj.bias" in table.shapes,
        head_norms=f"{attention}.q_norm.weight" in table.shapes,
        experts=getattr(config, "num_experts", 0),
        expert_width=getattr(config, "moe_intermediate_size", 0),
    )


def build_rollout(model: Model, placement: RolloutPlacement, rank: int) -> tuple[torch.nn.Module, VllmConfig]:
    """Build the model as a vLLM engine of this placement does; the groups of the previous placement are destroyed."""
    vllm_parallel_state.destroy_model_parallel()
    for group in ("_TP", "_PP", "_DP", "_EP"):  # vllm-ascend 0.9.1 destroys them, but only forgets its own copies
        setattr(vllm_parallel_state, group, None)
    os.environ |= {
        "VLLM_DP_SIZE": str(placement.dp),
        "VLLM_DP_RANK": str(rank // placement.tp % placement.dp),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
    }
    config = EngineArgs(
        model=str(model.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        swap_space=0,
        dtype="bfloat16",
        tensor_parallel_size=placement.tp,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=placement.ep > 1,
        additional_config={"refresh": True, "enable_prefill_optimizations": placement.shared_expert_replicated},
    ).create_engine_config()
    init_ascend_config(config)
    with set_current_vllm_config(config):
        vllm_parallel_state.init_distributed_environment(placement.tp, rank % placement.tp, "env://", rank, "hccl")
        vllm_parallel_state.ensure_model_parallel_initialized(placement.tp, 1)
        init_ascend_model_parallel(config.parallel_config.expert_parallel_size, config.parallel_config.lmhead_tp_size)
        return get_model(vllm_config=config), config


def upstream_weights(model: Model, rollout: torch.nn.Module) -> State:
    """Return every weight as upstream's own load_weights makes it from the HuggingFace tensors."""
    if model.has_experts:
        patch_vllm_moe_model_weight_loader(rollout)
    rollout.load_weights((name, value.npu()) for name, value in model.weights.items())
    return {name: tensor.data.cpu().clone() for name, tensor in rollout_tensors(rollout).items()}


def differing(tensors: State, expected: State) -> list[str]:
    return [name for name, tensor in tensors.items() if not same_bits(tensor.data.cpu(), expected[name])]


def check_types(model: Model, tensors: State, shards: list[Shard]) -> None:
    """Check that the weights which the layout keeps in float32 are float32, and all others in the model's dtype."""
    for shard in shards:
        kind = torch.float32 if shard.hf_name.endswith(model.table.float32) else torch.bfloat16
        assert tensors[shard.local].dtype == kind, (shard.local, tensors[shard.local].dtype)


def draws(model: Model, placement: RolloutPlacement, request: Request) -> Iterator[TrainPlacement]:
    draw = random.Random(f"{model.folder.name} {placement}")
    padded = -(-model.shape.vocab // 64) * 64
    for _ in range(request.train_layouts):
        yield draw_train_placement(
            draw, placement.world_size, model.table.layers, (padded, padded + 64), model.tensor_sizes
        )


def resharder(
    model: Model, train: TrainPlacement, rollout: RolloutPlacement, source: State, target: State
) -> Resharder:
    draw, world = random.Random(f"{train} {rollout}"), range(train.world_size)
    return Resharder(
        source,
        target,
        [model.table.megatron(train, rank) for rank in world],
        [model.table.vllm_ascend(rollout, rank) for rank in world],
        dist.group.WORLD,
        draw.choice([1 << 15, 1 << 17, 1 << 24]),
        model.table.castable,
        overlap=draw.random() < 0.5,
        ranks_per_node=draw.choice([None, 2]),
    )


def axes(model: Model, train: TrainPlacement, rollout: RolloutPlacement) -> list[str]:
    """Return the properties of this pair that count for the coverage."""
    experts, deepseek = model.has_experts, model.naive is reference
    group = train.ep * (train.tp if train.moe_tp_extend_ep else 1)
    found = {
        "pipeline stages": train.pp > 1,
        "stages of different lengths": len(set(train.num_layer_list)) > 1,
        "virtual stages": train.virtual_stages > 1,
        "TP grows": rollout.tp > train.tp,
        "TP shrinks": rollout.tp < train.tp,
        "several instances": rollout.instances > 1,
        "experts over TP x EP": experts and train.moe_tp_extend_ep and train.tp > 1,
        "experts over EP, cut over TP": experts and not train.moe_tp_extend_ep and train.tp > 1,
        "EP in training above rollout": experts and group > rollout.ep,
        "EP in training below rollout": experts and group < rollout.ep,
        "one dense layer first": deepseek and model.shape.dense_layers == 1,
        "two dense layers first": deepseek and model.shape.dense_layers == 2,
        "shared expert replicated": deepseek and rollout.shared_expert_replicated,
        "shared expert cut": deepseek and not rollout.shared_expert_replicated,
        model.folder.name: True,
        "key heads shared by ranks": not deepseek and rollout.tp > model.shape.kv_heads,
    }
    return [axis for axis, holds in found.items() if holds]


def wrong_byte_is_found(run: Resharder, source: State, target: State, expected: State) -> bool:
    """Change one byte of rank 0's embedding: a rollout weight must differ after a run, and none after the next."""
    first = kept = None
    if dist.get_rank() == 0:
        first = next(value for name, value in source.items() if "word_embeddings" in name).view(-1)[:1]
        kept = first.clone()
        changed = kept.view(torch.uint8).clone()
        changed[0] ^= 1
        first.copy_(changed.view(kept.dtype))
    run.run()
    found = torch.tensor([len(differing(target, expected))], device="npu")
    if first is not None:
        first.copy_(kept)
    dist.all_reduce(found)
    run.run()
    return int(found) > 0 and not differing(target, expected)


def check_model(model: Model, rank: int, request: Request) -> tuple[Counter, int]:
    """Check every pair of this model. Return the coverage, and how many wrong bytes were found."""
    covered, wrong = Counter(), 0
    for placement in model.rollout_placements(dist.get_world_size())[:: request.every]:
        rollout, config = build_rollout(model, placement, rank)
        read = rollout_placement(config)
        if model.has_experts:
            assert dataclasses.replace(read, lm_head_tp=None) == placement, (read, placement)
        target = rollout_tensors(rollout)
        expected = upstream_weights(model, rollout)
        check_types(model, target, model.table.vllm_ascend(read, rank))
        for number, train in enumerate(draws(model, placement, request)):
            source = model.train_state(train, rank)
            run = resharder(model, train, read, source, target)
            for tensor in target.values():
                tensor.data.fill_(torch.nan)
            run.run()
            different = differing(target, expected)
            assert not different, (different[:3], train, read)
            covered.update(["pairs", *axes(model, train, read)])
            if not number:
                assert wrong_byte_is_found(run, source, target, expected)
                wrong += 1
        del rollout, target
        gc.collect()
    return covered, wrong


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    request = Request(**json.loads((folder / "request.json").read_text()))
    covered, wrong = Counter(), 0
    for seed, name in enumerate(request.models):
        found, noticed = check_model(Model(folder / name, seed), rank, request)
        covered, wrong = covered + found, wrong + noticed
    (folder / f"{rank}.json").write_text(json.dumps({"covered": covered, "wrong bytes found": wrong}))
    dist.barrier()
