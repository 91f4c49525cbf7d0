"""Dynamic micro batches at Megatron's schedule: a batch is cut anew on its way in, and put in order on the way out."""

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
    """Let schedules that run in the block cut their batch into micro batches of at most `tokens`."""
    _limits.append(tokens)
    try:
        yield
    finally:
        _limits.pop()


@dataclass(frozen=True)
class Agreement:
    """What the ranks cut alike.

    group: data-parallel ranks, which have equally many micro batches. alignment: a sequence is padded to a multiple of
    so many tokens before a forward. parts: context-parallel ranks, which share a sequence's tokens.
    """

    group: dist.ProcessGroup
    alignment: int = 1
    parts: int = 1

    def number(self, mine: int, device: torch.device) -> int:
        """The largest number of micro batches that a rank needs. Collective: one all-reduce."""
        most = torch.tensor([mine], dtype=torch.int64, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most.item())


def agreement_of_ranks() -> Agreement:
    """That of Megatron's present groups."""
    from megatron.core import mpu

    parts = mpu.get_context_parallel_world_size()
    alignment = mpu.get_tensor_model_parallel_world_size() * (2 * parts if parts > 1 else 1)
    return Agreement(mpu.get_data_parallel_group(), alignment, parts)


def with_dynamic_batches(schedule: Callable[..., Any], agreement: Agreement) -> Callable[..., Any]:
    """Megatron's forward-backward `schedule`, which cuts its batch as the `limited` block around it says, if any.

    What a forward-only pass hands back is in the order of the batch, as the output of a single micro batch.
    """

    def run(*, data_iterator: Any, num_microbatches: int, forward_only: bool, **options: Any) -> Any:
        if not _limits:
            return schedule(
                data_iterator=data_iterator, num_microbatches=num_microbatches, forward_only=forward_only, **options
            )
        whole = torch.cat(list(data_iterator))
        places = micro_batches(whole["attention_mask"], _limits[-1] * agreement.parts, agreement)
        batches = [whole[torch.tensor(each, device=whole["attention_mask"].device)] for each in places]
        outputs = schedule(
            data_iterator=iter(batches), num_microbatches=len(batches), forward_only=forward_only, **options
        )
        return [_in_order(outputs, places)] if forward_only and outputs else outputs

    return run


def micro_batches(attention_mask: torch.Tensor, limit: int, agreement: Agreement) -> list[list[int]]:
    """Rows of `attention_mask` [sequences, length] by micro batch. Collective: one all-reduce."""
    tokens = attention_mask.sum(dim=-1, dtype=torch.int64)
    step = agreement.alignment
    lengths = [-(-length // step) * step for length in tokens.tolist()]
    number = agreement.number(len(first_fit(lengths, limit)), attention_mask.device)
    return spread(lengths, limit, number)


def _in_order(outputs: list[Any], places: list[list[int]]) -> Any:
    """One output with the rows of all micro batches, each where it lay in the batch."""
    order = torch.tensor([row for place in places for row in place]).argsort()
    return _joined(outputs, order.tolist())


def _joined(parts: list[Any], order: Any) -> Any:
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts], order) for name in first}
    if isinstance(first, list | tuple):
        return [_joined(list(each), order) for each in zip(*parts, strict=True)]
    return torch.cat(parts)[order] if isinstance(first, torch.Tensor) else first
