"""The log-probs of an engine's tokens, where verl asks the engine for them and drops them.

Training computes log-probs over the whole vocabulary at the temperature, so those are what it is compared with. Where
top-k, top-p or min-p take tokens away the engine reports the log-prob of the draw beside them (`temperature.sampled`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl_patches.features.temperature.sampled import is_narrowed, log_prob_of_model

PADDING = -1.0  # what later releases of verl put behind the end of a response


@contextmanager
def observed_outputs(engine: Any) -> Iterator[list[Any]]:
    """What `engine.generate` returns within the block, request by request, as it returns it."""
    seen: list[Any] = []
    # Others stand in for the method too, around this block.
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
    """[samples, length] float32 on the host: the log-prob of each sampled token, samples of a request in a row.

    Over the whole vocabulary, at the temperature.
    """
    rows = torch.full((sum(len(output.outputs) for output in outputs), length), PADDING)
    samples = (sample for output in outputs for sample in output.outputs)
    for row, sample in zip(rows, samples, strict=True):
        found = [log_prob_of_model(each) for each in _reported(sample)]
        row[: len(found)] = torch.tensor(found)
    return rows


def draws_are_narrowed(outputs: Sequence[Any]) -> bool:
    """Whether the engine drew from less than the whole vocabulary, and so reported other log-probs than the model's."""
    samples = (sample for output in outputs for sample in output.outputs if sample.token_ids)
    return any(is_narrowed(sample.logprobs[0][sample.token_ids[0]]) for sample in samples)


def kept_probabilities(outputs: Sequence[Any]) -> tuple[float, int]:
    """How much probability was left to draw from, summed over all tokens; and how many tokens there are.

    For example 0.5 of a token whose log-prob is -1.4 of the model, and -0.7 of the draw.
    """
    reported = [each for output in outputs for sample in output.outputs for each in _reported(sample)]
    return math.fsum(math.exp(log_prob_of_model(each) - each.logprob) for each in reported), len(reported)


def _reported(sample: Any) -> list[Any]:
    return [at[token] for token, at in zip(sample.token_ids, sample.logprobs, strict=True)]
