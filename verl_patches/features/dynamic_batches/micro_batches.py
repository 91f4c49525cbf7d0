"""Dynamic micro batches at Megatron's schedule: the batch is cut anew, and its outputs are put back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.features.dynamic_batches.packing import first_fit, spread

_limits: list[int] = []


@contextmanager
def limited(tokens: int) -> Iterator[None]:
    """Let schedules cut their batch into micro batches of at most `tokens` within this context."""
    _limits.append(tokens)
    try:
        yield
    finally:
        _limits.pop()


@dataclass(frozen=True)
class Agreement:
    """Parameters that the ranks must share to cut their batches alike.

    Attributes:
        group: data-parallel ranks, which have equally many micro batches.
        alignment: a sequence is padded to a multiple of so many tokens before a forward.
        parts: number of context-parallel ranks, which share a sequence's tokens.
    """

    group: dist.ProcessGroup
    alignment: int = 1
    parts: int = 1

    def number(self, mine: int, device: torch.device) -> int:
        """Return the largest number of micro batches that any rank needs. Collective: one all-reduce."""
        most = torch.tensor([mine], dtype=torch.int64, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most.item())


def agreement_of_ranks() -> Agreement:
    """Return the agreement of Megatron's current groups."""
    from megatron.core import mpu

    parts = mpu.get_context_parallel_world_size()
    alignment = mpu.get_tensor_model_parallel_world_size() * (2 * parts if parts > 1 else 1)
    return Agreement(mpu.get_data_parallel_group(), alignment, parts)


def with_dynamic_batches(schedule: Callable[..., Any], agreement: Agreement) -> Callable[..., Any]:
    """Wrap Megatron's forward-backward `schedule` to cut its batch by the limit of the `limited` context, if any.

    A forward-only pass returns its outputs in the order of the batch, as the output of a single micro batch.
    """

    def run(*, data_iterator: Any, num_microbatches: int, forward_only: bool, **options: Any) -> Any:
        if not _limits:
            return schedule(
                data_iterator=data_iterator, num_microbatches=num_microbatches, forward_only=forward_only, **options
            )
        whole = torch.cat(list(data_iterator))
        places = samples_of_micro_batches(whole["attention_mask"], _limits[-1] * agreement.parts, agreement)
        batches = [whole[torch.tensor(each, device=whole["attention_mask"].device)] for each in places]
        outputs = schedule(
            data_iterator=iter(batches), num_microbatches=len(batches), forward_only=forward_only, **options
        )
        return [_in_order(outputs, places)] if forward_only and outputs else outputs

    return run


def samples_of_micro_batches(attention_mask: torch.Tensor, limit: int, agreement: Agreement) -> list[list[int]]:
    """Return the rows of `attention_mask` [sequences, length] of each micro batch. Collective: one all-reduce."""
    tokens = attention_mask.sum(dim=-1, dtype=torch.int64)
    step = agreement.alignment
    lengths = [-(-length // step) * step for length in tokens.tolist()]
    number = agreement.number(len(first_fit(lengths, limit)), attention_mask.device)
    return spread(lengths, limit, number)


def _in_order(outputs: list[Any], places: list[list[int]]) -> Any:
    """Join the outputs of all micro batches into one, with the rows in the order of the batch."""
    order = torch.tensor([row for place in places for row in place]).argsort()
    return _joined(outputs, order.tolist())


def _joined(parts: list[Any], order: Any) -> Any:
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts], order) for name in first}
    if isinstance(first, list | tuple):
        return [_joined(list(each), order) for each in zip(*parts, strict=True)]
    return torch.cat(parts)[order] if isinstance(first, torch.Tensor) else first
