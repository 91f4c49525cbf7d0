"""One generation batch: prompts, the answers that the workers give to them, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_patches.features.dynamic_sampling.queue import Prompt
from verl_patches.features.step import Step, Workers, split


@dataclass(frozen=True)
class PromptGroup:
    """A prompt with its answers.

    Attributes:
        prompt: the prompt's place in the data.
        item: the prompt as the dataset returns it.
        answers: the answers as the workers return them.
        rewards: [answers, response length].
        further: further values of the reward function by name, one per answer.
    """

    prompt: Prompt
    item: Mapping[str, Any]
    answers: Any
    rewards: torch.Tensor
    further: Mapping[str, Sequence[Any]]


def generate_groups(
    prompts: Sequence[Prompt],
    items: Sequence[Mapping[str, Any]],
    collate: Callable[[Sequence[Any]], Any],
    n: int,
    workers: Workers,
    step: Step,
) -> list[PromptGroup]:
    """Let the workers generate `n` answers to each prompt, and score them; both are timed as parts of the step.

    Args:
        prompts: the prompts' places in the data.
        items: the dataset's items, one for each prompt.
        collate: makes a batch of items.
        n: answers per prompt.
        workers: generate and score the answers.
        step: the step in progress.
    """
    from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto

    batch, asked = split(collate(items))
    padded, padding = pad_dataproto_to_divisor(asked, workers.multiple)
    with step.timed("gen"):
        answers = unpad_dataproto(workers.generate(padded), padding * n)
    with step.timed("reward"):
        rewards, values = workers.reward(batch.repeat(n, interleave=True).union(answers))
    groups = []
    for index, (prompt, item) in enumerate(zip(prompts, items, strict=True)):
        own = slice(index * n, (index + 1) * n)
        of_answers = {name: each[own] for name, each in values.items() if len(each) == len(rewards)}
        groups.append(PromptGroup(prompt, item, answers[own], rewards[own], of_answers))
    return groups
