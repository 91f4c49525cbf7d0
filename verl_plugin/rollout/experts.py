"""Combines the experts of this rank alone, where vLLM-Ascend 0.23 reads a row of its outputs for those of other ranks.

A token's experts on other ranks have the place -1 among the outputs of this rank. vLLM-Ascend takes the absolute
value, so row 1 is read, and multiplies it by a weight of 0. Where row 1 is not finite, the product is NaN, and so is
the token: row 1 may belong to a padded row of a graph, or to nobody at all, whose memory nothing has written.
docs/upstream/vllm-ascend-other-ranks-experts.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method
from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAllGather


def redirect_to_zeros(outputs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Let the experts of other ranks stand for a row of zeros.

    The outputs of this rank's experts lie in front. If a token has an expert elsewhere there are fewer of them than
    rows, and the last row is nobody's: it becomes the row of zeros. Nothing here waits for the device or changes shape,
    so graphs can be captured of it.

    Args:
        outputs: of this rank's experts, [tokens x experts of a token, hidden size]; the last row may be written.
        places: the row of each token and expert, int32 [tokens x experts of a token]; negative for other ranks'.

    Returns:
        Places, none of them negative.
    """
    elsewhere = places < 0
    outputs[-1:].masked_fill_(elsewhere.any(), 0)
    return places.masked_fill(elsewhere, outputs.shape[0] - 1)


class FiniteCombine(TokenDispatcherWithAllGather):
    """vLLM-Ascend's dispatcher, in which a row that is not finite stays with its own token."""

    def token_combine(self, hidden_states: torch.Tensor, combine_metadata: Any, bias: Any = None) -> torch.Tensor:
        """As upstream."""
        places = redirect_to_zeros(hidden_states, combine_metadata.expanded_row_idx)
        return super().token_combine(hidden_states, replace(combine_metadata, expanded_row_idx=places), bias)


def combine_finite_experts() -> None:
    """Give `FiniteCombine` to the way of communication that the layers of a model have registered."""
    method = get_moe_comm_method(MoECommType.ALLGATHER)
    if method is None or type(method.token_dispatcher) is not TokenDispatcherWithAllGather:
        return  # a model without experts, or a chip whose dispatcher is another one
    config = method.moe_config
    method.token_dispatcher = FiniteCombine(
        top_k=config.experts_per_token, num_experts=config.num_experts, num_local_experts=config.num_local_experts
    )
