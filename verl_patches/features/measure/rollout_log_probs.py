"""The log-probs with which an engine sampled, where verl asks the engine for them and drops them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

PADDING = -1.0  # what later releases of verl put behind the end of a response


@contextmanager
def observed_outputs(engine: Any) -> Iterator[list[Any]]:
    """What `engine.generate` returns within the block, request by request, as it returns it."""
    seen: list[Any] = []
    generate = engine.generate

    def observing(*args: Any, **options: Any) -> Any:
        outputs = generate(*args, **options)
        seen.extend(outputs)
        return outputs

    engine.generate = observing
    try:
        yield seen
    finally:
        del engine.generate


def log_probs_of(outputs: Sequence[Any], length: int) -> torch.Tensor:
    """[samples, length] float32 on the host: the log-prob of each sampled token, samples of a request in a row."""
    rows = torch.full((sum(len(output.outputs) for output in outputs), length), PADDING)
    samples = (sample for output in outputs for sample in output.outputs)
    for row, sample in zip(rows, samples, strict=True):
        found = [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True)]
        row[: len(found)] = torch.tensor(found)
    return rows
