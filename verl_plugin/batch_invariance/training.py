"""A training forward that sums in the same order as the rollout's batch-invariant mode, token by token.

Loaded by `actor_rollout_ref.model.external_lib`, the module registers an attention named `batch_invariant` with
transformers, and replaces `aten::matmul`, `aten::linear` and the products of experts on the device, as the rollout does
in its batch-invariant mode. Both call the package `batch_invariant_ops`. Gradients are those of plain attention and of
plain products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

from verl_plugin.batch_invariance.checks import ATTENTION as NAME
from verl_plugin.batch_invariance.checks import ATTENTION_KEY as KEY
from verl_plugin.rollout.invariant_products import linear, replace_grouped_matmul, require_operators

_CAUSAL_AT_THE_END = 3
_MASK_SIZE = 2048  # of the mask that CANN requires with that mode


@cache
def install() -> list[torch.library.Library]:
    """Replace products on the device of this process, and register the attention; once.

    Returns:
        The libraries that hold the replacements; PyTorch's own kernels are back when they are freed.

    Raises:
        ImportError: the package of the operators is missing.
    """
    require_operators(f"{KEY}={NAME}")
    library = torch.library.Library("aten", "IMPL")
    # torch_npu has operators of its own for them, with their own derivatives: a replacement needs both keys.
    library.impl("matmul", product, "AutogradPrivateUse1")
    library.impl("matmul", torch.ops.batch_invariant_ops.npu_matmul_batch_invariant, "PrivateUse1")
    library.impl("linear", linear_product, "AutogradPrivateUse1")
    library.impl("linear", linear, "PrivateUse1")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # [batch, tokens], 0 for padding; or None
    return [library, replace_grouped_matmul()]


def linear_product(self: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replace torch.nn.functional.linear: multiply by the weight, then add the bias."""
    multiplied = product(self, weight.t())
    return multiplied if bias is None else multiplied + bias


def product(self: Tensor, other: Tensor) -> Tensor:
    """Replace torch.matmul."""
    if other.dim() == 1:
        return product(self, other.unsqueeze(1)).squeeze(-1)
    if self.dim() == 1:
        return product(self.unsqueeze(0), other).squeeze(-2)
    return _OneRowAtATime.apply(self, other)


class _OneRowAtATime(torch.autograd.Function):
    """Product of [..., rows, inner] and [..., inner, columns]: forward as the rollout, backward as plain products."""

    @staticmethod
    def forward(context: Any, self: Tensor, other: Tensor) -> Tensor:
        context.save_for_backward(self, other)
        return torch.ops.batch_invariant_ops.npu_matmul_batch_invariant(self, other)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        left, right = context.saved_tensors
        if right.dim() == 2:  # one product, however many dimensions are in front
            rows, flat = left.flatten(0, -2), gradient.flatten(0, -2)
            return torch.mm(flat, right.t()).view_as(left), torch.mm(rows.t(), flat)
        batch = gradient.shape[:-2]
        flat = gradient.flatten(0, -3)
        lefts, rights = (each.expand(*batch, -1, -1).flatten(0, -3) for each in (left, right))
        of_left, of_right = torch.bmm(flat, rights.transpose(1, 2)), torch.bmm(lefts.transpose(1, 2), flat)
        return (
            of_left.unflatten(0, batch).sum_to_size(left.shape),
            of_right.unflatten(0, batch).sum_to_size(right.shape),
        )


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **named: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention, with the signature of transformers' attention functions.

    Args:
        query: [batch, heads, tokens, size]; `key` and `value` with the heads of keys.
        attention_mask: [batch, tokens], 0 where there is padding; None: sequences begin where `position_ids` are 0.

    Returns:
        [batch, tokens, heads, size], zero at padding.

    Raises:
        ValueError: the attention is not that of the rollout: with dropout, not causal, or of a part of a sequence.
    """
    if dropout:
        raise ValueError("attention_dropout is invalid: the rollout has none. Set it to 0.")
    if named.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(
            "attn_implementation=batch_invariant is invalid: this attention, of images, is not causal. Set it to null."
        )
    if get_ulysses_sequence_parallel_world_size() > 1:
        raise ValueError(
            "ulysses_sequence_parallel_size is invalid: batch_invariant needs whole sequences. Set it to 1."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
    for row, start, end in sequences(query.shape[0], query.shape[2], attention_mask, named.get("position_ids")):
        parts = [each[row, :, start:end].transpose(0, 1).contiguous() for each in (query, key, value)]
        output[row, start:end] = _OneQueryAtATime.apply(*parts, scale)
    return output, None


def sequences(
    batch: int, tokens: int, attention_mask: Tensor | None, position_ids: Tensor | None
) -> list[tuple[int, int, int]]:
    """Return row, first token and end of each sequence.

    Padding is at the ends of a row: left of prompts and right of answers.
    """
    if attention_mask is not None:
        there = [each.nonzero().flatten().tolist() for each in attention_mask.bool().cpu()]
        return [(row, each[0], each[-1] + 1) for row, each in enumerate(there) if each]
    if position_ids is None:
        return [(row, 0, tokens) for row in range(batch)]
    found = []
    for row, positions in enumerate(position_ids.cpu().tolist()):
        starts = [place for place, position in enumerate(positions) if position == 0 or place == 0]
        found += [(row, start, end) for start, end in zip(starts, [*starts[1:], tokens], strict=True)]
    return found


class _OneQueryAtATime(torch.autograd.Function):
    """Attention of one sequence, [tokens, heads, size]: forward as the rollout, backward as plain attention."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        context.save_for_backward(query, key, value)
        context.scale = scale
        tokens = [query.shape[0]]
        output, _ = torch.ops.batch_invariant_ops.npu_fused_infer_attention_score_batch_invariant(
            query, key, value, num_heads=query.shape[1], num_key_value_heads=key.shape[1], scale=scale,
            input_layout="TND", atten_mask=_causal_mask(query.device), sparse_mode=_CAUSAL_AT_THE_END,
            actual_seq_lengths=tokens, actual_seq_lengths_kv=tokens,
        )  # fmt: skip
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = [each.detach().requires_grad_() for each in context.saved_tensors]
        with torch.enable_grad():
            output = plain_attention(given, context.scale)
        return (*torch.autograd.grad(output, given, gradient), None)


def plain_attention(given: Sequence[Tensor], scale: float) -> Tensor:
    """Compute causal attention of one sequence: query, key and value as [tokens, heads, size]."""
    query, key, value = (each.transpose(0, 1) for each in given)
    shared = query.shape[0] // key.shape[0]
    key, value = (each.repeat_interleave(shared, 0) for each in (key, value))
    hidden = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
    # torch.matmul is replaced in this process.
    scores = (torch.bmm(query.float(), key.float().transpose(1, 2)) * scale).masked_fill(hidden, -torch.inf)
    return torch.bmm(scores.softmax(-1), value.float()).to(query.dtype).transpose(0, 1)


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu(1)


install()
