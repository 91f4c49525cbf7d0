"""Compares a sample that ran in two batches: its log-probs, and the results of operators for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_plugin.batch_invariance.trace import Place, Seen, Trace


@dataclass(frozen=True)
class Answer:
    """The sample's answer: the tokens that an engine generated, and the log-prob of each."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class LogProbs:
    """How the log-probs of two runs differ.

    Attributes:
        compared: number of tokens before the first one that differs.
        differ: number of these tokens whose log-probs differ in any bit.
        largest: largest difference of two log-probs.
    """

    compared: int
    differ: int
    largest: float


@dataclass(frozen=True)
class Break:
    """The first operator whose result for the sample differs between two runs, though all earlier results are equal.

    Attributes:
        operator: PyTorch's name, such as `aten.mm.default`.
        layer: the layer that called it.
        position: first token of the sample whose result differs.
        alone, beside: shapes of the operator's input tensors, in the run of the sample alone and in the other one.
    """

    operator: str
    layer: str
    position: int
    alone: tuple[tuple[int, ...], ...]
    beside: tuple[tuple[int, ...], ...]


def compare_log_probs(alone: Answer, beside: Answer) -> LogProbs:
    """Compare bit for bit, up to the first token that differs: after it the runs have different inputs."""
    pairs = list(zip(alone.tokens, beside.tokens, strict=True))
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    log_probs = list(zip(alone.log_probs[:same], beside.log_probs[:same], strict=True))
    distances = [abs(one - other) for one, other in log_probs]
    return LogProbs(same, sum(one != other for one, other in log_probs), max(distances, default=0.0))


def first_break(alone: Trace, beside: Trace, prompt: int, same: int) -> Break | None:
    """Return the first operator, in the order in which the run alone called them, whose result differs for any token.

    All tokens are compared up to that operator, so the values that attention reads of earlier tokens are equal, too.

    Args:
        alone: trace of the run of the sample alone.
        beside: trace of the other run.
        prompt: number of tokens in the prompt.
        same: number of leading answer tokens that both runs chose; later tokens have other inputs.
    """
    found: tuple[int, int, Place] | None = None
    for position in sorted(alone.keys() & beside.keys()):
        if position >= prompt + same:
            break
        for place, seen in alone[position].items():
            other = beside[position].get(place)
            if other is None or _equal(seen, other):
                continue
            if found is None or seen.order < found[0]:
                found = (seen.order, position, place)
    if found is None:
        return None
    _, position, place = found
    return Break(place.operator, place.layer, position, alone[position][place].given, beside[position][place].given)


def _equal(one: Seen, other: Seen) -> bool:
    """Compare bit for bit, so that equal NaNs are equal."""
    same_kind = one.row.dtype == other.row.dtype and one.row.shape == other.row.shape
    return same_kind and bytes_of(one.row) == bytes_of(other.row)


def bytes_of(row: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of any type on the host."""
    return row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
