r"""The supervised phase before GRPO: a policy that can do the arithmetic and rarely gives the answer as it is asked to.

Every label has the right number, but only a share of the labels puts it in the box (`\boxed{12}`); the others give the
bare number, which the rule counts as wrong. The mean reward therefore starts near that share, and what GRPO has to
learn from right and wrong alone is, for the most part, the form of the answer; the arithmetic itself is mostly there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from verl_patches.features.dataset import INSTRUCTION, Problem
from verl_patches.features.tiny_model.grouped_experts import group_experts_of

_IGNORED = -100


@dataclass(frozen=True)
class WarmStart:
    """Settings of the supervised phase.

    `boxed_share` is the share of labels in the box; `ramp_steps` the steps over which the learning rate rises, after
    which it falls along a cosine to a twentieth.
    """

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 2e-3
    ramp_steps: int = 20
    boxed_share: float = 0.35

    def learning_rate_at(self, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * min(1.0, (step + 1) / self.ramp_steps) * (0.05 + 0.95 * cosine)


@dataclass(frozen=True)
class Examples:
    """Token rows, right padded: `inputs` and `labels` [examples, length]; labels are -100 where nothing is asked."""

    inputs: Tensor
    labels: Tensor


def encode_examples(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], responses: Sequence[str]
) -> Examples:
    """Encode one chat a problem, as verl asks it, with the response's tokens (and the end token) as labels."""
    rows, prompts = [], []
    for problem, response in zip(problems, responses, strict=True):
        question = [{"role": "user", "content": f"{problem.question} {INSTRUCTION}"}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
        rows.append(prompt + tokenizer.encode(response, add_special_tokens=False) + [tokenizer.eos_token_id])
        prompts.append(len(prompt))
    inputs = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels = torch.full_like(inputs, _IGNORED)
    for index, (row, start) in enumerate(zip(rows, prompts, strict=True)):
        inputs[index, : len(row)] = torch.tensor(row)
        labels[index, start : len(row)] = inputs[index, start : len(row)]
    return Examples(inputs, labels)


def boxed_examples(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> Examples:
    """Encode the problems with the right answer in the box."""
    return encode_examples(tokenizer, problems, [rf"\boxed{{{problem.answer}}}" for problem in problems])


def negative_log_likelihood(model: DeepseekV3ForCausalLM, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of every label in float32, [examples, length - 1]; 0 where no label is."""
    hidden = model.model(input_ids=inputs[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    losses = torch.zeros(targets.shape)
    asked = targets != _IGNORED
    losses[asked] = functional.cross_entropy(model.lm_head(hidden[asked]).float(), targets[asked], reduction="none")
    return losses


@torch.no_grad()
def expected_reward(model: DeepseekV3ForCausalLM, examples: Examples) -> float:
    """Return the mean probability of exactly the right boxed answer: the mean reward of samples at temperature 1."""
    return negative_log_likelihood(model, examples.inputs, examples.labels).sum(dim=1).neg().exp().mean().item()


def train(
    model: DeepseekV3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    settings: WarmStart,
    seed: int,
    progress: Callable[[int, float], None],
) -> float:
    """Train `model` (float32) in place on `problems`, with Adam on the token-mean cross entropy.

    Args:
        seed: draws the batches and the forms of their labels.
        progress: called after every step with the number of steps done and the loss.

    Returns:
        The expected reward on `problems` after the last step.
    """
    generator = torch.Generator().manual_seed(seed)
    boxed = boxed_examples(tokenizer, problems)
    bare = encode_examples(tokenizer, problems, [problem.answer for problem in problems])
    width = boxed.inputs.shape[1] - bare.inputs.shape[1]
    inputs = torch.cat([functional.pad(bare.inputs, (0, width), value=tokenizer.pad_token_id), boxed.inputs])
    labels = torch.cat([functional.pad(bare.labels, (0, width), value=_IGNORED), boxed.labels])
    parameters = group_experts_of(model) + [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        chosen = torch.randint(len(problems), (settings.batch_size,), generator=generator)
        in_box = torch.rand(settings.batch_size, generator=generator) < settings.boxed_share
        rows = chosen + len(problems) * in_box
        losses = negative_log_likelihood(model, inputs[rows], labels[rows])
        loss = losses.sum() / (labels[rows] != _IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress(step + 1, loss.item())
    return expected_reward(model, boxed)
