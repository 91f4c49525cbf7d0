r"""The supervised phase before GRPO: a policy that knows the tables and misreads the sign of most exercises.

Every label writes the exercise out and puts the right answer of what it wrote in the box, but only a share of the
labels writes the sign that was asked (`7*8=\boxed{56}`); the others write one of the other two (`7+8=\boxed{15}`). The
policy so learns the tables of all three signs, and its mean reward starts near that share. From correct/incorrect
rewards alone, GRPO has to learn to answer the exercise that was asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from post_training.data import INSTRUCTION
from rehearsal.tiny_model.grouped_experts import group_experts_of
from rehearsal.tiny_model.task import SIGNS, Exercise

IGNORED = -100


@dataclass(frozen=True)
class WarmStart:
    """Settings of the supervised phase.

    `right_sign_share` is the share of labels with the sign that was asked; `ramp_steps` the steps over which the
    learning rate rises, after which it falls along a cosine to a twentieth.
    """

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 2e-3
    ramp_steps: int = 20
    right_sign_share: float = 0.4

    def learning_rate_at(self, step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * min(1.0, (step + 1) / self.ramp_steps) * (0.05 + 0.95 * cosine)


@dataclass(frozen=True)
class Readings:
    """Every exercise answered with every sign: index `[exercise, sign]`, signs in the order of `SIGNS`.

    `inputs` and `labels` are [exercises, signs, length] token ids, right padded, labels -100 where nothing is asked;
    `asked` [exercises] is the index of the sign that was asked; `right` [exercises, signs] whether the reading's answer
    is the right one (`2+2` for `2*2` is).
    """

    inputs: Tensor
    labels: Tensor
    asked: Tensor
    right: Tensor


def encode_readings(tokenizer: PreTrainedTokenizerFast, exercises: Sequence[Exercise]) -> Readings:
    """Encode one chat a reading, as verl asks the exercise, with the answer's tokens and the end token as labels."""
    rows, starts = [], []
    for exercise in exercises:
        question = [{"role": "user", "content": f"{exercise.problem} {INSTRUCTION}"}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        for sign in SIGNS:
            response = tokenizer.encode(exercise.with_sign(sign).solution, add_special_tokens=False)
            rows.append([*prompt, *response, tokenizer.eos_token_id])
            starts.append(len(prompt))
    inputs, labels = padded_rows(rows, starts, tokenizer.pad_token_id)
    shape = (len(exercises), len(SIGNS), -1)
    right = [[exercise.with_sign(sign).answer == exercise.answer for sign in SIGNS] for exercise in exercises]
    asked = torch.tensor([SIGNS.index(exercise.sign) for exercise in exercises])
    return Readings(inputs.view(shape), labels.view(shape), asked, torch.tensor(right))


def padded_rows(rows: Sequence[Sequence[int]], starts: Sequence[int], pad: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, [rows, length], right padded with `pad`; labels are ignored before a row's start."""
    inputs = torch.full((len(rows), max(map(len, rows))), pad)
    labels = torch.full_like(inputs, IGNORED)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        inputs[index, : len(row)] = torch.tensor(row)
        labels[index, start : len(row)] = inputs[index, start : len(row)]
    return inputs, labels


def negative_log_likelihood(model: PreTrainedModel, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of every label in float32, [examples, length - 1]; 0 where no label is."""
    hidden = model.model(input_ids=inputs[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    losses = torch.zeros(targets.shape)
    asked = targets != IGNORED
    losses[asked] = functional.cross_entropy(model.lm_head(hidden[asked]).float(), targets[asked], reduction="none")
    return losses


@torch.no_grad()
def expected_reward(model: PreTrainedModel, readings: Readings) -> float:
    """Return the mean probability of the readings with a right answer: the mean reward of samples at temperature 1."""
    losses = negative_log_likelihood(model, readings.inputs.flatten(0, 1), readings.labels.flatten(0, 1))
    probabilities = losses.sum(dim=1).neg().exp().view(readings.right.shape)
    return (probabilities * readings.right).sum(dim=1).mean().item()


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    exercises: Sequence[Exercise],
    settings: WarmStart,
    seed: int,
    progress: Callable[[int, float], None],
) -> float:
    """Train `model` (float32) in place, with Adam on the token-mean cross entropy.

    Args:
        exercises: the questions, drawn with repetition.
        seed: draws the batches and the signs of their labels.
        progress: called after every step with the number of steps done and the loss.

    Returns:
        The expected reward on `exercises` after the last step.
    """
    readings = encode_readings(tokenizer, exercises)
    fit(model, readings, settings, seed, progress)
    return expected_reward(model, readings)


def fit(
    model: PreTrainedModel,
    readings: Readings,
    settings: WarmStart,
    seed: int,
    progress: Callable[[int, float], None],
) -> None:
    """Train `model` in place on readings of exercises; see `train`."""
    generator = torch.Generator().manual_seed(seed)
    parameters = group_experts_of(model) + [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, betas=(0.9, 0.98), fused=True)
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        chosen = torch.randint(len(readings.asked), (settings.batch_size,), generator=generator)
        misread = torch.rand(settings.batch_size, generator=generator) >= settings.right_sign_share
        shift = torch.randint(1, len(SIGNS), (settings.batch_size,), generator=generator)
        sign = (readings.asked[chosen] + misread * shift) % len(SIGNS)
        labels = readings.labels[chosen, sign]
        losses = negative_log_likelihood(model, readings.inputs[chosen, sign], labels)
        loss = losses.sum() / (labels != IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress(step + 1, loss.item())
