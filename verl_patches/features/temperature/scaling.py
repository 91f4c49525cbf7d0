"""Dividing logits by the sampling temperature where a log-prob is taken.

The policy that generates is softmax(logits / temperature). Its gradient, its old log-probs, the reference policy's and
those that the rollout reports must all be of that distribution, or the PPO ratio compares two different policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Below this vLLM takes the most likely token, and a log-prob at that temperature means nothing.
GREEDY_BELOW = 1e-5


def at_temperature(processor: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    """`processor(logits, ...)` fed with logits divided by `temperature`, in place: they are as large as the vocabulary
    is wide and nobody else reads them. At 1 nothing is divided, so the bits are upstream's."""
    if temperature == 1.0:
        return processor

    def scaled(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return processor(logits.div_(temperature), *arguments, **options)

    return scaled


_reported: list[torch.Tensor | None] = []


@contextmanager
def reporting(temperature: torch.Tensor | None) -> Iterator[None]:
    """Let `as_sampled` use `temperature` ([requests], float) in the block; None means that all requests are greedy."""
    _reported.append(temperature)
    try:
        yield
    finally:
        _reported.pop()


def as_sampled(logits: torch.Tensor) -> torch.Tensor:
    """A copy of `logits` [requests, vocabulary] at the temperature of each request; greedy requests keep theirs.

    Outside a `reporting` block, and when every temperature is 1, the logits themselves.
    """
    temperature = _reported[-1] if _reported else None
    if temperature is None:
        return logits
    divisor = torch.where(temperature < GREEDY_BELOW, torch.ones_like(temperature), temperature)
    return logits.float() / divisor.unsqueeze(1)
