"""Run updates of verl's engine with MindSpeed whose ranks share sequences, and compare with transformers.

`main(folder)` runs the cases in `cases.json`, which have the same context and tensor parallel sizes, and writes how far
a rank's results are from transformers' to `<name of the case>.<rank>.json`. The first rank writes gradients and updated
weights to `<name of the case>.safetensors`, under HF names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

# Import MindSpeed before Megatron-core.
import verl_plugin.mindspeed  # noqa: F401

# isort: split
import mindspeed
from megatron.core import parallel_state
from transformers import PreTrainedModel
from verl.models.mcore import model_forward
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

import verl_plugin.megatron_float32
import verl_plugin.routing_replay.engines  # noqa: F401
from post_training.layouts.layout import PADDING
from post_training.layouts.model_tensors import train_tensors
from post_training.models.families import table_for
from tests.stack_2026.routing_replay.reference import Reference
from tests.stack_2026.upstream.context_parallel_cases import SAMPLES, Case
from verl_plugin.alltoallv.megatron_layout import fitted, megatron_placement

# Tokens of a micro batch over all ranks that share it, which makes three micro batches.
MICRO_BATCH = 44
# With a large epsilon, Adam's first step is smooth in the gradient, instead of only its sign.
STEP: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.9, 0.95)}
EPSILON = 1e-3
CLIP = 0.2


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples with what a loss needs: tokens of each, and advantages and old log-probs of each answer's tokens."""

    tokens: list[torch.Tensor]
    advantages: list[torch.Tensor]
    old: list[torch.Tensor]
    experts: list[torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class Expected:
    """Transformers' results: log-probs of the answers, the loss, and by HF name gradients and updated weights."""

    batch: Batch
    log_probs: list[torch.Tensor]
    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def experts_of(model: Any, tokens: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Draw experts for each sample's tokens, [tokens, layers, experts per token]; 0 for the last one."""
    found = []
    for each in tokens:
        rows = len(each) * model.num_hidden_layers
        drawn = torch.stack([torch.randperm(model.num_experts, generator=generator) for _ in range(rows)])
        chosen = drawn[:, : model.num_experts_per_tok].view(len(each), model.num_hidden_layers, -1)
        chosen[-1] = 0
        found.append(chosen.to(torch.uint8))
    return found


def expected_of(folder: Path, replay: bool) -> Expected:
    """Compute PPO's loss with transformers and torch's autograd, and a step of torch's AdamW."""
    reference = Reference(folder)
    model, generator = reference.model, torch.Generator().manual_seed(11)
    tokens = [torch.randint(9, 500, (sum(lengths),), generator=generator) for lengths in SAMPLES]
    advantages = [torch.randn(1, generator=generator).expand(answer).clone() for _, answer in SAMPLES]
    experts = experts_of(model.config, tokens, generator) if replay else None
    whole = [reference.log_probs(*pair) for pair in zip(tokens, experts or [None] * len(tokens), strict=True)]
    found = [each[prompt - 1 :] for each, (prompt, _) in zip(whole, SAMPLES, strict=True)]
    old = [each.detach() + 0.1 * torch.randn(len(each), generator=generator) for each in found]
    ratios = [(new - before).exp() for new, before in zip(found, old, strict=True)]
    terms = [torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
             for ratio, advantage in zip(ratios, advantages, strict=True)]  # fmt: skip
    loss = -torch.cat(terms).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).item()
    gradients = by_name(model, lambda each: torch.zeros_like(each) if each.grad is None else each.grad)
    torch.optim.AdamW(model.parameters(), eps=EPSILON, **STEP).step()
    batch = Batch(tokens, advantages, old, experts)
    return Expected(batch, [each.detach() for each in found], loss.item(), norm, gradients, by_name(model, torch.clone))


def by_name(model: PreTrainedModel, values: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `values` of the parameters under HF names, one tensor per expert, as transformers writes a model."""
    own = [each.data for each in model.parameters()]
    for parameter in model.parameters():
        parameter.data = values(parameter).detach().clone()
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        found = safetensors.torch.load_file(Path(scratch, "model.safetensors"))
    for parameter, data in zip(model.parameters(), own, strict=True):
        parameter.data = data
    return found


def batch_of(batch: Batch, own: range, context: int) -> Any:
    """Build the batch of this rank's samples as verl's workers get it, with micro batches by tokens."""

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([values[index] for index in own], layout=torch.jagged)

    parts = list(zip(batch.tokens, SAMPLES, strict=True))
    masks = [torch.ones(answer, dtype=torch.int64) for _, answer in SAMPLES]
    tensors = {
        "input_ids": nested(batch.tokens),
        "position_ids": nested([torch.arange(len(tokens)) for tokens in batch.tokens]),
        "prompts": nested([tokens[:prompt] for tokens, (prompt, _) in parts]),
        "responses": nested([tokens[prompt:] for tokens, (prompt, _) in parts]),
        "response_mask": nested(masks),
        "loss_mask": nested(masks),
        "advantages": nested(batch.advantages),
        "old_log_probs": nested(batch.old),
    }
    if batch.experts:
        tensors["routed_experts"] = nested(batch.experts)
    settings = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": MICRO_BATCH // context,
        "use_remove_padding": True,
        "use_fused_kernels": False,
        "temperature": 1.0,
        "global_batch_size": len(SAMPLES),
        "update_lr_scheduler": True,
    }
    return tu.get_tensordict(tensors, settings)


def engine_of(folder: Path, case: Case) -> Any:
    """Build verl's engine of the actor for an NPU as its workers do."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # Megatron-core keeps the previous model's setting
    model = HFModelConfig(path=str(folder / case.model), load_tokenizer=False, use_remove_padding=True)
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    settings = McoreEngineConfig(
        vanilla_mbridge=True,
        use_remove_padding=True,
        use_dynamic_bsz=True,
        use_distributed_optimizer=case.distributed,
        context_parallel_size=case.context,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=1,
        router_replay=EngineRouterReplayConfig(mode="R3" if case.replay else "disabled"),
        override_transformer_config=case.transformer,
    )
    optimizer = McoreOptimizerConfig(
        **STEP, clip_grad=1e9, total_training_steps=10, override_optimizer_config={"adam_eps": EPSILON}
    )
    engine = EngineRegistry.new(
        "language_model",
        "megatron",
        model_config=model,
        engine_config=settings,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


@contextmanager
def planted(fault: str, engine: Any) -> Iterator[None]:
    """Plant a fault: the second context parallel rank swaps its chunks, or tokens are counted once per rank."""
    right = model_forward.preprocess_thd_engine

    def swapped(samples: torch.Tensor, *rest: Any, **named: Any) -> Any:
        rows, packed, positions = right(samples, *rest, **named)
        if parallel_state.get_context_parallel_rank() == 1 and not named.get("need_roll"):
            ends = (packed.cu_seqlens_q_padded // parallel_state.get_context_parallel_world_size()).diff().tolist()
            rows = torch.cat([each.roll(len(each) // 2, 0) for each in rows[0].split(ends)])[None]
        return rows, packed, positions

    with pytest.MonkeyPatch.context() as patch:
        if fault == "chunks":
            patch.setattr(model_forward, "preprocess_thd_engine", swapped)
        elif fault == "tokens":
            everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
            patch.setattr(engine, "get_data_parallel_group", lambda: everyone)
        yield


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between tensors of the same names."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((found[name] - each).abs().max().item() for name, each in expected.items())


@torch.no_grad()
def exported(engine: Any) -> dict[str, torch.Tensor]:
    """Return the model under HF names."""
    return {name: weight.cpu().clone() for name, weight in engine.bridge.export_weights(engine.module)}


@torch.no_grad()
def exported_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return gradients under HF names, exported as weights are. The optimizer restores the parameters."""
    parameters = [each for chunk in engine.module for each in chunk.parameters()]
    own = [each.detach().clone() for each in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    found = exported(engine)
    for parameter, data in zip(parameters, own, strict=True):
        parameter.data.copy_(data)
    return found


@torch.no_grad()
def offered_apart(engine: Any, weights: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between `weights` and the shards that this rank offers to the rollout."""
    rank, tensors = dist.get_rank(), train_tensors(engine.module)
    placement = megatron_placement(engine.tf_config, tensors)
    shards = fitted(table_for(engine.model_config.hf_config).megatron(placement, rank), tensors, placement, rank)
    differences = [0.0]
    for shard in (each for each in shards if each.hf_name != PADDING):
        region = weights[shard.hf_name][tuple(slice(*bound) for bound in shard.bounds)]
        differences.append((shard.view.of(tensors[shard.local]).cpu() - region).abs().max().item())
    return max(differences)


def found_of(folder: Path, case: Case, expected: Expected) -> dict[str, Any]:
    """Run the forward and an update of one case on this rank, and return the differences."""
    engine = engine_of(folder, case)
    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    own = range(rank * len(SAMPLES) // ranks, (rank + 1) * len(SAMPLES) // ranks)
    loss = partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1))
    found: dict[str, Any] = {"sources": engine.is_mp_src_rank_with_outputs(), "attention": attention_of(engine)}
    written: dict[str, torch.Tensor] = {}
    with planted(case.fault, engine):
        with engine.eval_mode():
            output = engine.infer_batch(batch_of(expected.batch, own, case.context))
        with engine.train_mode():
            engine.optimizer_zero_grad()
            update = engine.forward_backward_batch(batch_of(expected.batch, own, case.context), loss)
            if not case.distributed:
                gradients = exported_gradients(engine)
                found["gradients"] = furthest(gradients, expected.gradients)
                written |= {f"gradients/{name}": each for name, each in gradients.items()}
            found["norm"] = abs(float(engine.optimizer_step()) / expected.norm - 1)
    weights = exported(engine)
    found["weights"] = furthest(weights, expected.weights)
    found["offered"] = offered_apart(engine, weights)
    written |= {f"weights/{name}": each for name, each in weights.items()}
    if found["sources"]:
        logs = output["model_output"]["log_probs"].float().cpu().unbind()
        found["log_probs"] = max(
            (each[SAMPLES[index][0] - 1 : -1] - expected.log_probs[index]).abs().max().item()
            for index, each in zip(own, logs, strict=True)
        )
        found["loss"] = update["metrics"]["actor/pg_loss"].aggregate() / ranks
        found["experts"] = {name: value[0] for name, value in update["metrics"].items() if "expert" in name}
    if dist.get_rank() == 0:
        safetensors.torch.save_file(written, folder / f"{case.name}.safetensors")
    return found


def attention_of(engine: Any) -> str:
    """Return the class that computes the attention."""
    layers = [each for each in engine.module[0].modules() if hasattr(each, "linear_proj")]
    [name] = {type(each.core_attention).__qualname__ for each in layers}
    return name


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    cases = [Case(**each) for each in json.loads((folder / "cases.json").read_text())]
    # Do this before building an engine: verl replaces transformers' functions by the NPU's.
    kinds = {(case.model, case.replay) for case in cases}
    expected = {(model, replay): expected_of(folder / model, replay) for model, replay in kinds}
    for case in cases:
        wanted = expected[case.model, case.replay]
        found = found_of(folder, case, wanted) | {"expected_loss": wanted.loss, "mindspeed": mindspeed.__file__}
        (folder / f"{case.name}.{rank}.json").write_text(json.dumps(found))
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()
