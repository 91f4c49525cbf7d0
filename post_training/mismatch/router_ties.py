"""Finds tokens for which a router's choice depends on rounding in float32, because the last chosen expert is tied.

With biases near 5 neighbouring float32 scores are 4.8e-7 apart, and two engines that sum in another order differ by one
or two such steps. If the scores of the last chosen and the first rejected expert are that close, both choices are
right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

TIED_STEPS = 8
"""Distance, in neighbouring float32 numbers, up to which two scores may come out in either order."""


def choice_margins(
    scores: torch.Tensor, experts_per_token: int, num_groups: int = 1, groups_per_token: int = 1
) -> torch.Tensor:
    """Return how far each token's scores may move before its experts change: float32 [tokens].

    Args:
        scores: the scores that determine the choice, [tokens, experts].
        experts_per_token: number of chosen experts.
        num_groups, groups_per_token: experts come from the best groups, and a group's score is the sum of its two best.
    """
    margins = torch.full(scores.shape[:1], float("inf"), dtype=torch.float32, device=scores.device)
    if groups_per_token < num_groups:
        grouped = scores.unflatten(-1, (num_groups, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = group_scores.topk(groups_per_token + 1, dim=-1)
        margins = (best.values[:, -2] - best.values[:, -1]) / 2  # both of the two scores may move
        closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best.indices[:, :-1], False)
        scores = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    if experts_per_token < scores.shape[-1] * groups_per_token // num_groups:
        best = scores.topk(experts_per_token + 1, dim=-1)
        margins = torch.minimum(margins, best.values[:, -2] - best.values[:, -1])
    return margins / 2  # both scores may move towards each other


def tied_choices(router: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return for which of `tokens` [..., hidden] a Megatron router may choose other experts by rounding: bool [tokens].

    A router with an expert bias has its own scores; all others choose the highest logits. The softmax after these turns
    a difference of logits into a ratio of scores, which is rounded by `eps` even if the logits are small.
    """
    tokens = tokens.detach().reshape(-1, tokens.shape[-1])
    if hasattr(router, "choice_scores"):
        scores, groups = router.choice_scores(tokens), router.groups
        largest = scores.abs().amax(dim=-1)
    else:
        scores, groups = functional.linear(tokens.float(), router.weight.detach().float()), (1, 1)
        largest = scores.abs().amax(dim=-1).clamp(min=1)
    step = largest * torch.finfo(torch.float32).eps
    return choice_margins(scores, router.config.moe_router_topk, *groups) <= TIED_STEPS / 2 * step
