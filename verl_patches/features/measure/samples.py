"""Samples of a step, some prompts with responses and rewards, held on the driver until the step is logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from post_training.process_context import process_context
from post_training.report.samples import PROMPTS, RESPONSES, Sample, shortened


class _HeldSamples(list[Sample]):
    """The samples of the latest scored batch."""


def hold_samples(data: Any, result: Any, tokenizer: Any) -> None:
    """Hold some samples of a scored batch, in place of those of an earlier one.

    Args:
        data: verl's DataProto with `prompts` [batch, prompt length], `responses` [batch, response length] and their
            `attention_mask`; rows with the same `uid` answer the same prompt.
        result: the return value of verl's compute_reward, token-level rewards [batch, response length] first.
        tokenizer: of the reward manager; with None nothing is held.
    """
    held = process_context().keep(_HeldSamples())
    if tokenizer is not None:
        rewards = [value if math.isfinite(value) else None for value in result[0].sum(-1).tolist()]
        held.extend(_sample(data[row], group, rewards[row], tokenizer) for row, group in _rows(data))


def take_samples() -> list[Sample]:
    """Return the held samples and forget them."""
    return process_context().take(_HeldSamples)


def _rows(data: Any) -> list[tuple[int, int]]:
    """Return the rows to keep and their prompts' numbers: the batch's first prompts, each one's responses together.

    For example, to keep 2 prompts with 2 responses each, rows of the prompts B A B C A give (0, 0) (2, 0) (1, 1)
    (4, 1): both of B, then both of A.
    """
    prompts = data.non_tensor_batch.get("uid", range(len(data)))
    rows: dict[Any, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt in rows or len(rows) < PROMPTS:
            rows.setdefault(prompt, []).append(row)
    return [(row, group) for group, found in enumerate(rows.values()) for row in found[:RESPONSES]]


def _sample(item: Any, group: int, reward: float | None, tokenizer: Any) -> Sample:
    tensors, length = item.batch, item.batch["prompts"].shape[-1]
    prompt = _tokens(tensors["prompts"], tensors["attention_mask"][:length])
    response = _tokens(tensors["responses"], tensors["attention_mask"][length:])
    truth = str((item.non_tensor_batch.get("reward_model") or {}).get("ground_truth", ""))
    prompt_text, response_text = shortened(tokenizer.decode(prompt)), shortened(tokenizer.decode(response))
    return Sample(group, prompt_text, response_text, shortened(truth), reward, len(response))


def _tokens(tokens: Any, mask: Any) -> Sequence[int]:
    """Return the token ids without padding, on either side: [length]."""
    return tokens[mask.bool()].tolist()
