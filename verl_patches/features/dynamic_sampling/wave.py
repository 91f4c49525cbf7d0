"""One wave: prompts, the answers that the workers give to them, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from verl_patches.features.dynamic_sampling.queue import Prompt

# What verl's loop takes out of a batch for generation; of the second line, what there is.
_GENERATED_FROM = ("input_ids", "attention_mask", "position_ids")
_ALSO_GENERATED_FROM = ("raw_prompt_ids", "multi_modal_data", "raw_prompt", "tools_kwargs")


@dataclass(frozen=True)
class Workers:
    """What makes answers and rewards.

    generate: verl's call for a `DataProto` of prompts, whose number is a multiple of `multiple`.
    reward: for a `DataProto` of answers, [answers, response length] and further values of each answer by name.
    """

    generate: Callable[[Any], Any]
    multiple: int
    reward: Callable[[Any], tuple[torch.Tensor, Mapping[str, Sequence[Any]]]]


@dataclass(frozen=True)
class Group:
    """A prompt with its answers: `item` as the dataset gives it, `answers` as the workers do.

    rewards: [answers, response length]. further: what else the reward function returns, one value per answer.
    """

    prompt: Prompt
    item: Mapping[str, Any]
    answers: Any
    rewards: torch.Tensor
    further: Mapping[str, Sequence[Any]]


def asked_of(batch: Any) -> Any:
    """What verl's loop would take out of `batch`, a `DataProto`, to generate from; it is taken out."""
    further = [name for name in _ALSO_GENERATED_FROM if name in batch.non_tensor_batch]
    return batch.pop(batch_keys=list(_GENERATED_FROM), non_tensor_batch_keys=further)


def generate_groups(
    prompts: Sequence[Prompt],
    items: Sequence[Mapping[str, Any]],
    collate: Callable[[Sequence[Any]], Any],
    n: int,
    workers: Workers,
    seconds: MutableMapping[str, float],
) -> list[Group]:
    """Let the workers give `n` answers to each prompt, and score them.

    items: the dataset's, a prompt each. seconds: what generation and reward took is added, by verl's names.
    """
    from verl import DataProto
    from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto

    batch = DataProto.from_single_dict(collate(items))
    asked = asked_of(batch)
    padded, padding = pad_dataproto_to_divisor(asked, workers.multiple)
    with _timed(seconds, "gen"):
        answers = unpad_dataproto(workers.generate(padded), padding * n)
    with _timed(seconds, "reward"):
        rewards, values = workers.reward(batch.repeat(n, interleave=True).union(answers))
    groups = []
    for index, (prompt, item) in enumerate(zip(prompts, items, strict=True)):
        own = slice(index * n, (index + 1) * n)
        of_answers = {name: each[own] for name, each in values.items() if len(each) == len(rewards)}
        groups.append(Group(prompt, item, answers[own], rewards[own], of_answers))
    return groups


@contextmanager
def _timed(seconds: MutableMapping[str, float], name: str) -> Iterator[None]:
    begun = perf_counter()
    yield
    seconds[name] += perf_counter() - begun
