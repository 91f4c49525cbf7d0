"""A router whose scores are one softmax over all experts, as in Qwen3-MoE."""

import torch
import torch.nn.functional as F

from post_training.models.megatron.moe_config import MoETransformerConfig


class SoftmaxRouter(torch.nn.Module):
    """Chooses and weighs the experts of each token, in fp32 whatever the dtype of the model.

    ``weight`` [experts, hidden] is replicated over tensor-parallel ranks.
    """

    def __init__(self, config: MoETransformerConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.device("npu", torch.npu.current_device())
        self.weight = torch.nn.Parameter(
            torch.empty(config.num_moe_experts, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights fp32 and expert indices int64, both [tokens, top_k], for ``tokens`` [tokens, hidden]."""
        scores = F.linear(tokens.float(), self.weight.float()).softmax(dim=-1)
        weights, experts = scores.topk(self.config.moe_router_topk, dim=-1)
        if self.config.moe_router_norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts
