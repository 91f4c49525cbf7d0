"""A mixture-of-experts layer with experts sharded over tensor x expert parallel ranks."""

import dataclasses

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule

from post_training.models.megatron.expert_dispatch import ExpertDispatch
from post_training.models.megatron.grouped_experts import GroupedExperts
from post_training.models.megatron.moe_config import MoETransformerConfig


class ShardedMoELayer(MegatronModule):
    """Routed experts plus shared experts, if there are any (DeepSeek-V3, arXiv:2412.19437, equation 12).

    Each tensor-parallel rank routes its own share of the sequence. The shared experts are one dense network, cut over
    tensor-parallel ranks.
    """

    def __init__(self, config: MoETransformerConfig, router: type[torch.nn.Module]) -> None:
        super().__init__(config=config)
        self._group = parallel_state.get_tensor_and_expert_parallel_group()
        self.router = router(config)
        self.experts = GroupedExperts(config, config.num_moe_experts // dist.get_world_size(self._group))
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            # A field of Megatron's own dataclass, whose source the type checker does not read.
            shared = dataclasses.replace(config, ffn_hidden_size=config.moe_shared_expert_intermediate_size)  # type: ignore[call-arg]
            self.shared_experts = MLP(shared, MLPSubmodules(ColumnParallelLinear, RowParallelLinear))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[tokens of this rank, 1, hidden] to the same shape, and no bias."""
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        weights, experts = self.router(tokens)
        dispatch = ExpertDispatch.plan(experts, self.config.num_moe_experts, self._group)
        rows = self.experts(dispatch.send(tokens), dispatch.counts)
        routed = torch.bmm(weights.unsqueeze(1), dispatch.bring_back(rows).float()).to(tokens.dtype)
        output = routed.view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)[0]
        return output, None
