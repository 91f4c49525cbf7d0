"""Experts dealt out in turn: the i-th choice of a batch, counted over tokens and their places, is expert i mod experts.

For 3 tokens, 2 experts a token and 4 experts:

    token 0 -> 0, 1     token 1 -> 2, 3     token 2 -> 0, 1

Over n choices no expert has more than one token more than another, and where n is a multiple of the number of experts
all have the same. MindSpeed-LLM v2.0.0 deals in the same way with `--fix-router`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # families of models are listed without torch, from all modules of this folder
    import torch

# Sigmoid and softmax alike leave the others, up to 1 away from this, a share that vanishes in bfloat16.
CHOSEN, OTHERS = 20.0, -20.0


def dealt_experts(tokens: int, per_token: int, experts: int, device: torch.device) -> torch.Tensor:
    """int64 [tokens, per_token]: the experts of each token."""
    import torch

    return torch.arange(tokens * per_token, device=device).view(tokens, per_token) % experts


def logits_for_dealt_experts(logits: torch.Tensor, per_token: int) -> torch.Tensor:
    """[tokens, experts] logits of which any router chooses `dealt_experts`, in the type of `logits`.

    They move with `logits` by no more than 1, so that these are still computed, in a graph too, and NaN among them
    shows. Where a router chooses from some groups of experts only, those of a token lie in one group if `per_token`
    divides a group, and in two neighbouring ones otherwise.
    """
    import torch

    tokens, experts = logits.shape
    first = torch.arange(tokens, device=logits.device).unsqueeze(1) * per_token
    behind_first = (torch.arange(experts, device=logits.device).unsqueeze(0) - first) % experts
    wanted = torch.where(behind_first < per_token, CHOSEN, OTHERS).to(logits.dtype)
    return wanted + logits.clamp(-1, 1)


def balanced(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` of vLLM-Ascend's fused experts, choosing the dealt ones; it calls that with keywords alone.

    A bias on the choice of experts is a learned balance, which has nothing left to do.
    """

    def apply_balanced(*, router_logits: torch.Tensor, top_k: int, **options: Any) -> Any:
        bias = options.pop("e_score_correction_bias", None)
        return apply(
            router_logits=logits_for_dealt_experts(router_logits, top_k),
            top_k=top_k,
            e_score_correction_bias=None if bias is None else bias.new_zeros(bias.shape),
            **options,
        )

    return apply_balanced
