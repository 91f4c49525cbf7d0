"""Agreements between data-parallel rollout ranks, each one all-reduce on the device group.

vLLM's offline engine and vLLM-Ascend's model runner make these agreements on the host over gloo, twice per forward;
each takes 10 to 14 ms on 128 cards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from verl_patches.features.dp_sync.sync_window import LocalState, ReducedState
from verl_patches.features.measure.step_record import current_record


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Return whether `flag` is true on any rank of the device group."""
    return bool(largest([int(flag)], group)[0])


def largest(vector: list[int], group: dist.ProcessGroup, in_rollout: bool = True) -> list[int]:
    """Return the largest value of every element over the ranks of the device group; elements fit int32.

    Args:
        vector: this rank's values.
        group: the device group.
        in_rollout: count it among the step's agreements. An engine's start must not: it would count in the first step
            of every process, so that the step after a resume would have other metrics than in the unbroken run.
    """
    shared = torch.tensor(vector, dtype=torch.int32).npu()
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    if not in_rollout:
        return [int(value) for value in shared.tolist()]
    record = current_record()
    record.count("collectives/rollout_agreement/count")
    record.count("collectives/rollout_agreement/bytes", shared.numel() * shared.element_size())
    return [int(value) for value in shared.tolist()]


def total(vector: list[int], group: dist.ProcessGroup) -> list[int]:
    """Return the sum of every element over the ranks of the device group; sums fit int32."""
    shared = torch.tensor(vector, dtype=torch.int32).npu()
    dist.all_reduce(shared, group=group)
    record = current_record()
    record.count("collectives/rollout_metrics/count")
    record.count("collectives/rollout_metrics/bytes", shared.numel() * shared.element_size())
    return [int(value) for value in shared.tolist()]


def forward_of_rank(
    mine: LocalState, agreed: ReducedState, rank: int, fixed_sizes: bool
) -> tuple[int, torch.Tensor, bool, bool]:
    """Return the sizes of a rank's forward under the agreement.

    If any rank has a prompt, none pads. Otherwise every rank pads; with `fixed_sizes`, as a compiled graph needs, all
    of them to the largest size. Without it, a rank may by now run less than it announced, but every rank still lays out
    its exchanges for the largest announced size: with 4 and 2 tokens announced and 3 left on rank 0, it is [3, 4].

    Returns:
        tokens that this rank runs, tokens of every rank (int32, on the host), prefill anywhere, two batches everywhere.
    """
    if agreed.with_prefill:
        return mine.tokens, _counts(agreed.tokens), True, agreed.two_batches
    most = max(*agreed.padded_tokens, mine.padded_tokens)
    if fixed_sizes:
        return most, _counts([most] * len(agreed.padded_tokens)), False, agreed.two_batches
    counts = list(agreed.padded_tokens)
    if mine.padded_tokens != counts[rank]:
        counts = [most] * len(counts)
        counts[rank] = mine.padded_tokens
    return mine.padded_tokens, _counts(counts), False, agreed.two_batches


def _counts(values: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
