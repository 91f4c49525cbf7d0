"""Compares a sample that ran in two batches: its log-probs, and what operators made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_plugin.batch_invariance.trace import Place, Seen, Trace


@dataclass(frozen=True)
class Answer:
    """What an engine generated for the sample: tokens, and the log-prob of each."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class LogProbs:
    """How the log-probs of two runs differ.

    Attributes:
        compared: tokens up to the first at which the runs parted.
        differ: how many of them have another log-prob, to the last bit.
        largest: difference.
    """

    compared: int
    differ: int
    largest: float


@dataclass(frozen=True)
class Break:
    """The first operator that makes something else of the sample, though all before it made the same.

    Attributes:
        operator: as `aten.mm.default`.
        layer: where it was called.
        position: first token of the sample for which it did.
        alone, beside: shapes of the tensors that it was given, in the run alone and in the other one.
    """

    operator: str
    layer: str
    position: int
    alone: tuple[tuple[int, ...], ...]
    beside: tuple[tuple[int, ...], ...]


def compare_log_probs(alone: Answer, beside: Answer) -> LogProbs:
    """Compare bit for bit, up to the first token that differs: behind it the runs compute something else."""
    pairs = list(zip(alone.tokens, beside.tokens, strict=True))
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    log_probs = list(zip(alone.log_probs[:same], beside.log_probs[:same], strict=True))
    distances = [abs(one - other) for one, other in log_probs]
    return LogProbs(same, sum(one != other for one, other in log_probs), max(distances, default=0.0))


def first_break(alone: Trace, beside: Trace, prompt: int, same: int) -> Break | None:
    """The first operator, in the order in which the run alone called them, whose result differs for any token.

    All tokens are compared up to that operator, so what attention reads of earlier tokens is the same, too.

    Args:
        prompt: tokens of the prompt.
        same: tokens of the answer that both runs chose; later ones have other inputs.
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
    """Bit for bit, so that two values that are not a number are the same."""
    same_kind = one.row.dtype == other.row.dtype and one.row.shape == other.row.shape
    return same_kind and bytes_of(one.row) == bytes_of(other.row)


def bytes_of(row: torch.Tensor) -> bytes:
    """What a tensor on the host holds, in any type."""
    return row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
