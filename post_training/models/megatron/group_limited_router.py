"""DeepSeek-V3's router: sigmoid scores, expert bias for the choice, experts from a limited number of groups.

DeepSeek-V3, arXiv:2412.19437, section 2.1.2: the bias takes part in the choice of experts and not in their weights.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from post_training.models.expert_bias import float32_expert_bias
from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig
from post_training.models.router_balance import dealt_experts


def choose_experts(
    biased_scores: torch.Tensor, num_groups: int, groups_per_token: int, experts_per_token: int
) -> torch.Tensor:
    """Return indices int64 [tokens, experts_per_token] of the chosen experts, best first.

    ``biased_scores`` is [tokens, experts]. The score of a group is the sum of its two best scores; experts outside the
    best ``groups_per_token`` groups cannot be chosen.
    """
    if groups_per_token < num_groups:
        grouped = biased_scores.unflatten(-1, (num_groups, -1))
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        allowed = group_scores.topk(groups_per_token, dim=-1).indices
        closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, allowed, False)
        biased_scores = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
    return biased_scores.topk(experts_per_token, dim=-1).indices


class GroupLimitedRouter(torch.nn.Module):
    """Chooses and weighs the experts of each token, in fp32 whatever the dtype of the model.

    ``weight`` [experts, hidden] is replicated over tensor-parallel ranks. ``expert_bias`` fp32 [experts] is a buffer:
    it is learned by load balancing during pre-training and stays fixed here; it stays fp32 when the model is cast.
    """

    expert_bias: torch.Tensor

    def __init__(self, config: DeepseekV3TransformerConfig) -> None:
        super().__init__()
        self.config = config
        experts = config.num_moe_experts
        device = torch.device("npu", torch.npu.current_device())
        self.weight = torch.nn.Parameter(
            torch.empty(experts, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32, device=device))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "GroupLimitedRouter":
        with float32_expert_bias(self):
            super()._apply(fn, recurse)
        return self

    @property
    def groups(self) -> tuple[int, int]:
        """Number of groups of experts, and number of groups from which a token's experts are chosen."""
        return self.config.moe_router_num_groups, self.config.moe_router_group_topk

    @torch.no_grad()
    def choice_scores(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores by which experts are chosen, fp32 [tokens, experts], for ``tokens`` [tokens, hidden]."""
        return F.linear(tokens.float(), self.weight.float()).sigmoid() + self.expert_bias

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights fp32 and expert indices int64, both [tokens, top_k], for ``tokens`` [tokens, hidden]."""
        config = self.config
        scores = F.linear(tokens.float(), self.weight.float()).sigmoid()
        experts = self._choose(scores)
        weights = scores.gather(1, experts)
        if config.moe_router_norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * config.moe_router_topk_scaling_factor, experts

    @torch.no_grad()
    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return expert indices int64 [tokens, top_k] for ``scores`` [tokens, experts]."""
        config = self.config
        if config.moe_router_force_load_balancing:
            return dealt_experts(scores.shape[0], config.moe_router_topk, config.num_moe_experts, scores.device)
        return choose_experts(scores + self.expert_bias, *self.groups, config.moe_router_topk)
