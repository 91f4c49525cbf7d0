"""A recorded step with values from transformers and plain torch, and the same step with faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from tests.stack_2026.verl.test_jobs import ACTOR, ONE_CARD, ROLLOUT
from verl_plugin.jobs import compose_job
from verl_plugin.step_record.folder import Column, RecordedStep

PROMPTS, ANSWERS, MODEL = 2, 4, "actor_rollout_ref.model"
KL = 0.01
_SIZES = ((5, 3), (4, 6), (3, 2), (6, 4), (2, 5), (5, 5), (4, 1), (3, 4))
_OF_TOKENS = ("input_ids", "position_ids", "prompts", "responses")
_SCORES = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0)


def config_of(model: Path, dies: int) -> dict[str, Any]:
    """Return a shipped job's configuration at the sizes of the step, in float32."""
    types = "{param_dtype:float32,reduce_dtype:float32,buffer_dtype:float32}"
    keys = [
        f"{MODEL}.path={model}", f"+{MODEL}.load_tokenizer=false", f"{MODEL}.enable_gradient_checkpointing=false",
        f"{MODEL}.use_remove_padding=false", f"data.train_batch_size={PROMPTS}", f"{ROLLOUT}.n={ANSWERS}",
        f"{ACTOR}.ppo_mini_batch_size={PROMPTS}", f"{ACTOR}.kl_loss_coef={KL}", f"{ROLLOUT}.dtype=float32",
        f"trainer.n_gpus_per_node={dies}", f"{MODEL}.external_lib=null", f"{ACTOR}.ppo_max_token_len_per_gpu=64",
    ]  # fmt: skip
    for part in (ACTOR, "actor_rollout_ref.ref"):
        keys += [f"{part}.fsdp_config.dtype=float32", f"+{part}.fsdp_config.mixed_precision={types}"]
        keys += [f"{part}.fsdp_config.param_offload=false"]
    return OmegaConf.to_container(compose_job(ONE_CARD, keys), resolve=True)  # type: ignore[return-value]  # a mapping


def recorded(model: Path, dies: int) -> RecordedStep:
    """Compute a GRPO step with one update in plain transformers; old and reference log-probs are the model's."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(3, 90, (sum(size),), generator=generator) for size in _SIZES]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logs = [_log_probs(plain, each, prompt) for each, (prompt, _) in zip(tokens, _SIZES, strict=True)]
    scores = torch.tensor(_SCORES).view(PROMPTS, ANSWERS)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
    # The ratio to the old policy is 1, and log-probs of the reference are the model's: the loss is the mean of
    # -advantage, and its gradient that of -advantage * log-prob; the KL loss has a gradient of zero.
    count = sum(len(each) for each in logs)
    loss = sum(-advantage * each.sum() for advantage, each in zip(advantages, logs, strict=True)) / count
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters() if parameter.grad is not None]).norm()
    value = float(sum(-a * len(each) for a, each in zip(advantages, logs, strict=True)) / count)
    prompts = [prompt for prompt, _ in _SIZES]
    ones = [torch.ones(answer, dtype=torch.int64) for _, answer in _SIZES]
    rows: Mapping[str, list[torch.Tensor]] = {
        "input_ids": tokens,
        "position_ids": [torch.arange(len(each)) for each in tokens],
        "prompts": [each[:prompt] for each, prompt in zip(tokens, prompts, strict=True)],
        "responses": [each[prompt:] for each, prompt in zip(tokens, prompts, strict=True)],
        "response_mask": ones,
        "loss_mask": ones,
        "rm_scores": [_last(score, answer) for score, (_, answer) in zip(_SCORES, _SIZES, strict=True)],
        "advantages": [advantage * one for advantage, one in zip(advantages, ones, strict=True)],
        **{name: [each.detach() for each in logs] for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob")},
    }
    given = {
        "calculate_entropy": False, "distillation_use_topk": False, "distillation_only": False, "epochs": 1, "seed": 1,
        "global_batch_size": len(_SIZES), "mini_batch_size": len(_SIZES), "temperature": 1.0,
        "dataloader_kwargs": {"shuffle": False},
    }  # fmt: skip
    metrics = {"actor/grad_norm": float(norm), "actor/pg_loss": value, "actor/kl_loss": 0.0}
    keys = [f"prompt{prompt}_{answer}_0" for prompt in range(PROMPTS) for answer in range(ANSWERS)]
    columns = {name: Column(values, True) for name, values in rows.items()}
    return RecordedStep(1, keys, columns, given, metrics, config_of(model, dies), dies)


def _log_probs(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    logits = model(input_ids=tokens[None]).logits[0, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens[prompt:, None]).squeeze(1)


def _last(score: float, answer: int) -> torch.Tensor:
    return torch.cat([torch.zeros(answer - 1), torch.tensor([score])])


def _with(record: RecordedStep, name: str, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> RecordedStep:
    column = record.columns[name]
    return replace(record, columns={**record.columns, name: replace(column, rows=change(list(column.rows)))})


def _swapped(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Swap the tokens of two samples whose answers have the same length."""
    rows[3], rows[7] = rows[7], rows[3]
    return rows


def _unmasked(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    rows[2] = torch.tensor([1, 0])
    return rows


def _of_another_group(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    rows[6] = -rows[6]
    return rows


def _stale(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Shift log-probs, as if the rollout had sampled from the previous step's weights."""
    return [row + 0.01 * torch.sin(torch.arange(len(row)) + 1.0) for row in rows]


FAULTS: Mapping[str, Callable[[RecordedStep], RecordedStep]] = {
    "right": lambda record: record,
    "swapped": lambda record: reduce(lambda one, name: _with(one, name, _swapped), _OF_TOKENS, record),
    "mask": lambda record: _with(record, "response_mask", _unmasked),
    "advantage": lambda record: _with(record, "advantages", _of_another_group),
    "stale": lambda record: _with(record, "rollout_log_probs", _stale),
    "norm": lambda record: replace(record, metrics={**record.metrics, "actor/grad_norm": 0.5}),
    "poisoned": lambda record: record,
}
