"""Combines only this rank's experts; vLLM-Ascend 0.23 reads a row of this rank's outputs for those of other ranks too.

A token's experts on other ranks have the place -1 among the outputs of this rank. vLLM-Ascend takes the absolute
value, so it reads row 1, and multiplies it by a weight of 0. If row 1 is not finite, the product is NaN, and so is the
token: row 1 may belong to a padded row of a graph, or to no token at all and be uninitialised memory.
See docs/upstream/vllm-ascend-other-ranks-experts.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method
from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAllGather


def redirect_to_zeros(outputs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Point the places of other ranks' experts at a row of zeros.

    The outputs of this rank's experts lie in front. If a token has an expert elsewhere there are fewer outputs than
    rows, so the last row is unused and becomes the row of zeros. Nothing here waits for the device or changes shape, so
    graphs can capture it.

    Args:
        outputs: of this rank's experts, [tokens x experts of a token, hidden size]; its last row may be set to zeros.
        places: the row of each token and expert, int32 [tokens x experts of a token]; negative for other ranks'.

    Returns:
        The places, none of them negative.
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
    """Give `FiniteCombine` to the all-gather communication method that the model's layers have registered."""
    method = get_moe_comm_method(MoECommType.ALLGATHER)
    if method is None or type(method.token_dispatcher) is not TokenDispatcherWithAllGather:
        return  # a model without experts, or a chip whose dispatcher is another one
    config = method.moe_config
    method.token_dispatcher = FiniteCombine(
        top_k=config.experts_per_token, num_experts=config.num_experts, num_local_experts=config.num_local_experts
    )
