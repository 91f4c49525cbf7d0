"""Agreements between data-parallel rollout ranks, each one all-reduce on the device group.

vLLM's offline engine and vLLM-Ascend's model runner make these agreements on the host over gloo, where one takes
10 to 14 ms on 128 cards. The outcome is decided by globally reduced values alone, so every rank acts alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_patches.features.measure.step_record import current_record


@dataclass(frozen=True)
class ForwardShape:
    """What one rank is about to run, or what all ranks have agreed on.

    padded_tokens, tokens: token count with and without padding; with_prefill: a prompt is among them; two_batches: the
    rank could split its batch into two that overlap.
    """

    padded_tokens: int
    tokens: int
    with_prefill: bool
    two_batches: bool


@dataclass(frozen=True)
class AgreedForward:
    """Every rank's token counts (int32, on the host, [ranks]) and the flags that hold for all: prefill anywhere,
    two batches everywhere."""

    padded_tokens: torch.Tensor
    tokens: torch.Tensor
    with_prefill: bool
    two_batches: bool


def any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Whether `flag` holds on any rank of the device group."""
    value = torch.tensor([int(flag)], dtype=torch.int32, device="npu")
    _all_reduce(value, dist.ReduceOp.MAX, group)
    return bool(value.item())


def exchange_forward(mine: ForwardShape, rank: int, ranks: int, group: dist.ProcessGroup) -> AgreedForward:
    """Tell every rank of the device group what this one is about to run.

    One sum over a vector in which each rank fills its own two slots and adds its flags to the last two.
    """
    vector = torch.zeros(2 * ranks + 2, dtype=torch.int32)
    vector[rank] = mine.padded_tokens
    vector[ranks + rank] = mine.tokens
    vector[2 * ranks] = mine.with_prefill
    vector[2 * ranks + 1] = not mine.two_batches
    shared = vector.npu()
    _all_reduce(shared, dist.ReduceOp.SUM, group)
    vector = shared.cpu()
    return AgreedForward(
        padded_tokens=vector[:ranks],
        tokens=vector[ranks : 2 * ranks],
        with_prefill=bool(vector[2 * ranks]),
        two_batches=not bool(vector[2 * ranks + 1]),
    )


def forward_of_rank(
    mine: ForwardShape, agreed: AgreedForward, fixed_sizes: bool
) -> tuple[int, torch.Tensor, bool, bool]:
    """What a rank runs after the agreement.

    With a prompt anywhere nobody pads. Otherwise every rank pads; with `fixed_sizes`, as a compiled graph needs, all of
    them to the largest size.

    Returns:
        tokens that this rank runs, tokens of every rank (int32, on the host), prefill anywhere, two batches everywhere.
    """
    if agreed.with_prefill:
        return mine.tokens, agreed.tokens, True, agreed.two_batches
    if not fixed_sizes:
        return mine.padded_tokens, agreed.padded_tokens, False, agreed.two_batches
    largest = int(agreed.padded_tokens.max())
    return largest, torch.full_like(agreed.padded_tokens, largest), False, agreed.two_batches


def _all_reduce(value: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    dist.all_reduce(value, op=operation, group=group)
    record = current_record()
    record.count("collectives/rollout_agreement/count")
    record.count("collectives/rollout_agreement/bytes", value.numel() * value.element_size())
