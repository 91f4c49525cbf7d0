"""The two log-probs of a sampled token: that of the draw, and that of the model at the temperature.

Top-k, top-p and min-p exclude tokens and renormalise the rest, so that a token is drawn more often than the model's own
distribution says. The engine reports the log-prob of the draw. Training knows the whole vocabulary but not which tokens
were left, so it must be compared with the model's own log-prob: both are kept if they differ.

vLLM has no field for a second log-prob. It takes the place of the token's rank, which verl never reads and which
travels with the token through every queue: as the bits of a float32 with the sign bit set, which as an integer is never
positive, whereas ranks are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl_patches.features.temperature.scaling import GREEDY_BELOW


@dataclass
class Draw:
    """The distribution that the tokens of one step are drawn from.

    Attributes:
        narrowed: Whether more than the temperature changes the distribution, and log-probs are requested.
        probabilities: [requests, vocabulary] float32, set when tokens are drawn.
    """

    narrowed: bool
    probabilities: torch.Tensor | None = None


_draws: list[Draw] = []


def narrows(metadata: Any) -> bool:
    """Return whether a batch's vLLM SamplingMetadata changes its distribution by more than the temperature."""
    limits = (metadata.top_k, metadata.top_p, metadata.min_p, metadata.allowed_token_ids_mask)
    return (
        any(limit is not None for limit in limits)
        or not metadata.no_penalties
        or bool(metadata.min_tokens)
        or bool(metadata.bad_words_token_ids)
        or any(metadata.logit_bias)
    )


@contextmanager
def drawing(metadata: Any) -> Iterator[Draw]:
    """Let `remember` keep the probabilities of a batch with this SamplingMetadata within this context."""
    _draws.append(Draw(metadata.max_num_logprobs is not None and narrows(metadata)))
    try:
        yield _draws[-1]
    finally:
        _draws.pop()


def remember(probabilities: torch.Tensor) -> None:
    """Keep a copy of the probabilities that tokens are drawn from, if it is needed; vLLM draws in place."""
    if _draws and _draws[-1].narrowed:
        _draws[-1].probabilities = probabilities.clone()


def as_drawn(output: Any, draw: Draw, temperature: torch.Tensor | None) -> Any:
    """Return vLLM's SamplerOutput with the log-probs of the draw, and those of the model in place of the ranks.

    Args:
        output: Its log-probs [requests, 1 + likeliest tokens] are the model's at the temperature.
        draw: The draw of the same batch; without probabilities the output is returned unchanged.
        temperature: [requests] float; a greedy request takes its likeliest token and keeps the model's log-prob.
    """
    found = output.logprobs_tensors
    if found is None or draw.probabilities is None or temperature is None:
        return output
    drawn = draw.probabilities.gather(1, found.logprob_token_ids.long()).log()
    greedy = (temperature < GREEDY_BELOW).unsqueeze(1)
    of_model = found.logprobs[:, 0].contiguous().abs().neg().view(torch.int32).long()
    both = found._replace(logprobs=torch.where(greedy, found.logprobs, drawn), selected_token_ranks=of_model)
    return replace(output, logprobs_tensors=both)


def is_narrowed(reported: Any) -> bool:
    """Return whether a token's vLLM Logprob holds the model's log-prob beside that of the draw."""
    return reported.rank is not None and reported.rank <= 0


def log_prob_of_model(reported: Any) -> float:
    """Return the log-prob of a token over the whole vocabulary at the temperature, from its vLLM Logprob."""
    return struct.unpack("<f", struct.pack("<i", reported.rank))[0] if is_narrowed(reported) else reported.logprob
