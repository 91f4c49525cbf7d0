"""The attention mask of answers, from how many tokens the engine generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def masked_to_lengths(attention: torch.Tensor, width: int, lengths: Sequence[int]) -> torch.Tensor:
    """Return the mask of prompts and answers in which each answer has as many ones as it has tokens.

    Token ids do not say where an answer ends: padding may be one of the end tokens, and an end token that only the
    engine knows is followed by padding that looks like an answer.

    Args:
        attention: [answers, prompt width + width], 1 for tokens; the prompts' part is kept.
        width: Width of the answers' part.
        lengths: Tokens of each answer, its end token included.

    Raises:
        ValueError: The number of answers differs, or one is longer than `width`.
    """
    longest = max(lengths, default=0)
    if len(lengths) != len(attention) or longest > width:
        raise ValueError(f"{len(lengths)} answers of up to {longest} tokens for {tuple(attention.shape)}")
    places = torch.arange(width, device=attention.device)
    counted = torch.tensor(lengths, device=attention.device)[:, None]
    return torch.cat((attention[:, :-width], (places < counted).to(attention.dtype)), dim=-1)


def lengths_of(outputs: Sequence[Any]) -> list[int]:
    """Return the number of tokens of each answer in vLLM's RequestOutputs, the answers to a request in a row."""
    return [len(answer.token_ids) for output in outputs for answer in output.outputs]
