"""Division of logits by the sampling temperature, wherever log-probs are computed.

The policy that generates is softmax(logits / temperature). Its gradient, its old log-probs, the reference policy's and
those that the rollout reports must all belong to that distribution, or the PPO ratio compares two different policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Below this vLLM takes the most likely token, and a log-prob at that temperature means nothing.
GREEDY_BELOW = 1e-5


def at_temperature(processor: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    """Wrap `processor(logits, ...)` to divide the logits by `temperature` first.

    It divides in place, because logits are as large as the vocabulary is wide and nothing else reads them. At 1 it
    divides nothing, so the bits are upstream's.
    """
    if temperature == 1.0:
        return processor

    def scaled(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return processor(logits.div_(temperature), *arguments, **options)

    return scaled


_reported: list[torch.Tensor | None] = []


@contextmanager
def reporting(temperature: torch.Tensor | None) -> Iterator[None]:
    """Let `as_sampled` use `temperature` ([requests], float) within this context; None: all requests are greedy."""
    _reported.append(temperature)
    try:
        yield
    finally:
        _reported.pop()


def as_sampled(logits: torch.Tensor) -> torch.Tensor:
    """Return a copy of `logits` [requests, vocabulary] at each request's temperature; greedy requests keep theirs.

    Outside a `reporting` context, and if all requests are greedy, it returns the logits themselves.
    """
    temperature = _reported[-1] if _reported else None
    if temperature is None:
        return logits
    divisor = torch.where(temperature < GREEDY_BELOW, torch.ones_like(temperature), temperature)
    return logits.float() / divisor.unsqueeze(1)
