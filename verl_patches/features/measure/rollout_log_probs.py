"""The log-probs of an engine's tokens, which verl requests from the engine and then drops.

Training computes log-probs over the whole vocabulary at the temperature, so it is compared with the engine's log-probs
of that kind. If top-k, top-p or min-p exclude tokens, the engine reports the log-prob of the draw beside them
(`temperature.sampled`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl_patches.features.temperature.sampled import is_narrowed, log_prob_of_model

PADDING = -1.0  # later releases of verl pad responses with it


@contextmanager
def observed_outputs(engine: Any) -> Iterator[list[Any]]:
    """Collect the outputs of `engine.generate` within this context, unchanged and request by request."""
    seen: list[Any] = []
    # Other features replace the method on the object too, around this context.
    generate, stand_in = engine.generate, vars(engine).get("generate")

    def observing(*args: Any, **options: Any) -> Any:
        outputs = generate(*args, **options)
        seen.extend(outputs)
        return outputs

    engine.generate = observing
    try:
        yield seen
    finally:
        if stand_in is None:
            del engine.generate
        else:
            engine.generate = stand_in


def log_probs_of(outputs: Sequence[Any], length: int) -> torch.Tensor:
    """Return the log-prob of each sampled token, the samples of a request in a row: [samples, length] float32, on host.

    They are over the whole vocabulary, at the temperature.
    """
    rows = torch.full((sum(len(output.outputs) for output in outputs), length), PADDING)
    samples = (sample for output in outputs for sample in output.outputs)
    for row, sample in zip(rows, samples, strict=True):
        found = [log_prob_of_model(each) for each in _reported(sample)]
        row[: len(found)] = torch.tensor(found)
    return rows


def draws_are_narrowed(outputs: Sequence[Any]) -> bool:
    """Return whether the engine drew from a part of the vocabulary, so that its log-probs are not the model's."""
    samples = (sample for output in outputs for sample in output.outputs if sample.token_ids)
    return any(is_narrowed(sample.logprobs[0][sample.token_ids[0]]) for sample in samples)


def kept_probabilities(outputs: Sequence[Any]) -> tuple[float, int]:
    """Return the probability that was left to draw from, summed over all tokens, and the number of tokens.

    For example, a token with log-prob -1.4 by the model and -0.7 in the draw had 0.5 left.
    """
    reported = [each for output in outputs for sample in output.outputs for each in _reported(sample)]
    return math.fsum(math.exp(log_prob_of_model(each) - each.logprob) for each in reported), len(reported)


def _reported(sample: Any) -> list[Any]:
    return [at[token] for token, at in zip(sample.token_ids, sample.logprobs, strict=True)]
