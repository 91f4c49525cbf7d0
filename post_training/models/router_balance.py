"""Deal experts out in turn: the i-th choice of a batch, counted over tokens and their choices, is expert i mod experts.

For 3 tokens, 2 experts per token and 4 experts:

    token 0 -> 0, 1     token 1 -> 2, 3     token 2 -> 0, 1

Over n choices the loads of two experts differ by at most one token, and are equal if n is a multiple of the number of
experts. MindSpeed-LLM v2.0.0 deals in the same way with `--fix-router`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # families of models are listed without torch, from all modules of this folder
    import torch

# With sigmoid and with softmax, the share of the others, up to 1 away from this, vanishes in bfloat16.
CHOSEN, OTHERS = 20.0, -20.0


def dealt_experts(tokens: int, per_token: int, experts: int, device: torch.device) -> torch.Tensor:
    """Return the experts of each token, int64 [tokens, per_token]."""
    import torch

    return torch.arange(tokens * per_token, device=device).view(tokens, per_token) % experts


def logits_for_dealt_experts(logits: torch.Tensor, per_token: int) -> torch.Tensor:
    """Return [tokens, experts] logits from which any router chooses `dealt_experts`, in the type of `logits`.

    They vary with `logits` by at most 1, so that `logits` are still computed, in a graph too, and NaN in them shows. If
    a router chooses only from some groups of experts, those of a token are in one group if `per_token` divides a group,
    and in two neighbouring ones otherwise.
    """
    import torch

    tokens, experts = logits.shape
    first = torch.arange(tokens, device=logits.device).unsqueeze(1) * per_token
    behind_first = (torch.arange(experts, device=logits.device).unsqueeze(0) - first) % experts
    wanted = torch.where(behind_first < per_token, CHOSEN, OTHERS).to(logits.dtype)
    return wanted + logits.clamp(-1, 1)


def balanced(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `apply` of vLLM-Ascend's fused experts, called only with keywords, to choose the dealt experts.

    A bias on the choice of experts is a learned balance, which is not needed here and set to zero.
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
