"""Ranks that compare training models with transformers, in every parallel layout in turn, in one set of processes.

Each rank writes its results to ``rank<n>.json``, which test_training_models.py checks.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.megatron_workers  # noqa: F401
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from omegaconf import OmegaConf
from transformers import AutoConfig
from verl.models.mcore import get_mcore_forward_fn, hf_to_mcore_config, init_mcore_model
from verl.utils.model import load_megatron_gptmodel_weights

from post_training.layouts.layout import Shard, TrainPlacement
from post_training.layouts.model_tensors import train_tensors
from post_training.models.families import table_for

LEARNING_RATE = 0.01
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Layout:
    name: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    stages: list[int] = field(default_factory=list)
    recompute: bool = False


LAYOUTS = [
    Layout("data4"),
    Layout("tensor2", tensor=2),
    Layout("pipeline2", pipeline=2, stages=[2, 1]),
    Layout("tensor2_pipeline2", tensor=2, pipeline=2, stages=[2, 1]),
    Layout("tensor2_expert2", tensor=2, expert=2),
    Layout("expert4", expert=4),
    Layout("pipeline2_expert2", pipeline=2, expert=2, stages=[2, 1]),
    Layout("tensor2_recompute", tensor=2, recompute=True),
]

FAULTS: dict[str, dict[str, Any]] = {
    "mscale dropped": {"mscale_all_dim": 0.0},
    "group limit dropped": {"moe_router_num_groups": 1, "moe_router_group_topk": 1},
    "scaling factor dropped": {"moe_router_topk_scaling_factor": 1.0},
    "yarn dropped": {"rotary_scaling_factor": 1.0},
}


class Trial:
    """One model in one layout, with the checkpoint loaded and Megatron's data-parallel wrapper around it."""

    def __init__(
        self,
        checkpoint: Path,
        layout: Layout,
        sharded_optimizer: bool = False,
        dtype: torch.dtype = torch.float32,
        value: bool = False,
        **overrides: Any,
    ) -> None:
        self.hf_config = AutoConfig.from_pretrained(checkpoint)
        if layout.stages:
            overrides["num_layer_list"] = layout.stages
        if layout.recompute:
            overrides |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
        self.config = hf_to_mcore_config(self.hf_config, dtype, **overrides)
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        module = init_mcore_model(self.config, self.hf_config, first, last, value=value).npu()
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if dtype != torch.float32:
            module = Float16Module(self.config, module)  # wrapped as in verl's get_model
            for name, weight in train_tensors([module]).items():
                kept = torch.float32 if name.endswith("expert_bias") else dtype
                assert weight.dtype == kept, (name, weight.dtype)
        self.module = module
        self.model = DistributedDataParallel(
            config=self.config,
            module=module,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=sharded_optimizer
            ),
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        source = OmegaConf.create({"model": {"path": str(checkpoint)}, "megatron": {"seed": 1}})
        load_megatron_gptmodel_weights(source, self.hf_config, [self.model], dtype, is_value_model=value)

    def run(self, batch: dict[str, torch.Tensor], backward: bool, together: bool = False) -> torch.Tensor | None:
        """Return full logits [sequences of this rank, length, vocabulary] on the last stage, and None on others.

        Gradients stay in main_grad. Every sequence is its own micro batch; with ``together`` all sequences form one.
        """
        data_parallel = parallel_state.get_data_parallel_world_size()
        mine = {
            name: value.chunk(data_parallel)[parallel_state.get_data_parallel_rank()] for name, value in batch.items()
        }
        sequences = len(mine["input_ids"])
        rows = sequences if together else 1
        micro_batches = [
            {name: value[row : row + rows] for name, value in mine.items()} for row in range(0, sequences, rows)
        ]
        logits: list[torch.Tensor] = []
        # Megatron averages over micro batches and data-parallel ranks; the reference is a sum.
        scale = len(micro_batches) * data_parallel
        self.model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, logits=logits, scale=scale),
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not backward,
        )
        return torch.cat(logits) if logits else None

    def _forward_step(
        self, micro_batches: Any, model: Any, logits: list[torch.Tensor], scale: int
    ) -> tuple[torch.Tensor, Callable]:
        batch = {name: value.npu() for name, value in next(micro_batches).items()}
        output = get_mcore_forward_fn(self.hf_config)(
            model,
            batch["input_ids"],
            batch["attention_mask"],
            batch["position_ids"],
            sequence_parallel=self.config.sequence_parallel,
        )

        def loss(local_logits: torch.Tensor) -> tuple[torch.Tensor, dict]:
            logits.append(whole_vocabulary(local_logits.detach()).cpu())
            share = batch["coefficients"].chunk(parallel_state.get_tensor_model_parallel_world_size(), dim=-1)
            mine = share[parallel_state.get_tensor_model_parallel_rank()]
            return (local_logits * mine).sum() * scale, {}

        return output, loss


def whole_vocabulary(local_logits: torch.Tensor) -> torch.Tensor:
    shards = [torch.empty_like(local_logits) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(shards, local_logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(shards, dim=-1)


def training_shards(hf_config: Any, layout: Layout) -> list[Shard]:
    placement = TrainPlacement(
        tp=layout.tensor,
        pp=layout.pipeline,
        ep=layout.expert,
        dp=parallel_state.get_data_parallel_world_size(),
        num_layer_list=tuple(layout.stages or [hf_config.num_hidden_layers // layout.pipeline] * layout.pipeline),
    )
    return table_for(hf_config).megatron(placement, dist.get_rank())


def relative_errors(
    shards: list[Shard], local: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return the largest deviation of the local shard of each HF tensor, relative to that tensor's largest entry."""
    errors: dict[str, float] = {}
    for shard in shards:
        if shard.hf_name not in reference or shard.local not in local:
            continue
        expected = reference[shard.hf_name]
        share = expected[tuple(slice(*interval) for interval in shard.bounds)]
        deviation = (shard.view.of(local[shard.local]).cpu() - share).abs().max().item()
        size = expected.abs().max().item()
        error = deviation / size if size else deviation
        errors[shard.hf_name] = max(error, errors.get(shard.hf_name, 0.0))
    return errors


def logits_error(logits: torch.Tensor | None, reference: dict[str, Any]) -> float | None:
    if logits is None:
        return None
    data_parallel, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    expected = reference["logits"].chunk(data_parallel)[rank]
    mask = reference["batch"]["attention_mask"].chunk(data_parallel)[rank]
    return (logits - expected)[mask].abs().max().item()


def start_layout(layout: Layout) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def compare_layout(folder: Path, layout: Layout, reference: dict[str, Any]) -> dict[str, Any]:
    trial = Trial(folder / "checkpoint", layout)
    logits = trial.run(reference["batch"], backward=True)
    gradients = {name: parameter.main_grad for name, parameter in trial.module.named_parameters()}
    return {
        "logits": logits_error(logits, reference),
        "gradients": relative_errors(training_shards(trial.hf_config, layout), gradients, reference["gradients"]),
    }


def compare_optimizer_step(folder: Path, layout: Layout, reference: dict[str, Any]) -> dict[str, Any]:
    """Compare one step of Megatron's distributed Adam with hand-computed Adam on the reference gradients.

    With adam_eps = 1 the first step is lr * g / (|g| + 1), which does not amplify rounding of small gradients.
    """
    trial = Trial(folder / "checkpoint", layout, sharded_optimizer=True)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        adam_eps=1.0,
        weight_decay=0.0,
        clip_grad=CLIP_NORM,
        params_dtype=torch.float32,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, [trial.model])
    trial.run(reference["batch"], backward=True)
    _, norm, _ = optimizer.step()
    weights = {name: parameter.data for name, parameter in trial.module.named_parameters()}
    return {
        "norm": float(norm),
        "weights": relative_errors(training_shards(trial.hf_config, layout), weights, reference["stepped"]),
    }


def stepped_weights(folder: Path, gradients: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    weights = load_file(folder / "checkpoint" / "model.safetensors")
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    clip = min(1.0, CLIP_NORM / (norm + 1e-6))
    stepped = {
        name: weights[name] - LEARNING_RATE * gradient * clip / ((gradient * clip).abs() + 1)
        for name, gradient in gradients.items()
    }
    return norm, stepped


def faulty_results(folder: Path, reference: dict[str, Any]) -> dict[str, float]:
    """Return the errors of deliberately wrong models in the layout ``tensor2``; the comparison must detect each."""
    layout = LAYOUTS[1]
    start_layout(layout)
    errors = {}
    for fault, overrides in FAULTS.items():
        trial = Trial(folder / "checkpoint", layout, **overrides)
        errors[fault] = logits_error(trial.run(reference["batch"], backward=False), reference)
    trial = Trial(folder / "checkpoint", layout)
    for layer in trial.module.decoder.layers[1:]:
        layer.mlp.router.expert_bias.zero_()
    errors["expert bias dropped"] = logits_error(trial.run(reference["batch"], backward=False), reference)
    trial = Trial(folder / "checkpoint", layout)
    for name, parameter in trial.module.named_parameters():
        if "router" in name or "linear_qkv" in name:
            parameter.sequence_parallel = False
    trial.run(reference["batch"], backward=True)
    gradients = {name: parameter.main_grad for name, parameter in trial.module.named_parameters()}
    errors["gradients not summed over tensor-parallel ranks"] = max(
        relative_errors(training_shards(trial.hf_config, layout), gradients, reference["gradients"]).values()
    )
    return errors


def compare_dense_model(folder: Path) -> dict[str, Any]:
    """Compare Qwen2, run with TP2 x PP2 through verl's own configuration, loader and forward function."""
    layout = Layout("tensor2_pipeline2", tensor=2, pipeline=2)
    start_layout(layout)
    reference = torch.load(folder / "dense_reference.pt", weights_only=True)
    trial = Trial(folder / "dense_checkpoint", layout)
    logits = trial.run(reference["batch"], backward=True)
    results = {"logits": logits_error(logits, reference), "gradients": {}}
    for name, parameter in trial.module.named_parameters():
        if name in reference["gradients"]:
            expected = reference["gradients"][name]
            if parameter.tensor_model_parallel:
                expected = expected.chunk(layout.tensor)[parallel_state.get_tensor_model_parallel_rank()]
            deviation = (parameter.main_grad.cpu() - expected).abs().max() / expected.abs().max()
            results["gradients"][name] = deviation.item()
    return results


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    reference["norm"], reference["stepped"] = stepped_weights(folder, reference["gradients"])
    results: dict[str, Any] = {"layouts": {}, "steps": {}, "norm": reference["norm"]}
    for layout in LAYOUTS:
        start_layout(layout)
        results["layouts"][layout.name] = compare_layout(folder, layout, reference)
        results["steps"][layout.name] = compare_optimizer_step(folder, layout, reference)
    results["faults"] = faulty_results(folder, reference)
    results["dense"] = compare_dense_model(folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
