"""Adds up the experts of a token in one order, however they are spread over data-parallel engines.

vLLM-Ascend adds up a token's experts on each engine, then these sums over the engines. Where the experts lie then
decides which numbers are added first, and training, which has all experts on every die, gets other bits. Here engines
exchange the results of experts, and the engine of the token adds them up as if it had them all. The exchange grows by
the number of experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_dp_group
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.device.device_op import DeviceOperator
from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method
from vllm_ascend.ops.fused_moe.prepare_finalize import PrepareAndFinalizeWithAllGather

from verl_plugin.rollout.experts import FiniteCombine, redirect_to_zeros


class RowsOfExperts(FiniteCombine):
    """Returns the results of experts, not yet added up.

    Attributes:
        weights: of the experts of all engines' tokens, [engines x tokens, experts of a token].
    """

    weights: torch.Tensor

    def token_dispatch(self, token_dispatch_input: Any) -> Any:
        """As upstream."""
        self.weights = token_dispatch_input.topk_weights
        return super().token_dispatch(token_dispatch_input)

    def token_combine(self, hidden_states: torch.Tensor, combine_metadata: Any, bias: Any = None) -> torch.Tensor:
        """Return [engines x tokens, experts of a token x hidden size], zero for experts of other engines."""
        places = redirect_to_zeros(hidden_states, combine_metadata.expanded_row_idx)
        return hidden_states.index_select(0, places).view(len(self.weights), -1)


class SumInOrder(PrepareAndFinalizeWithAllGather):
    """Adds up what `RowsOfExperts` returned."""

    def __init__(self, config: Any, dispatcher: RowsOfExperts) -> None:
        super().__init__(config)
        self._dispatcher = dispatcher

    def finalize(
        self, hidden_states: torch.Tensor, reduce_results: bool, padded_hidden_states_shape: torch.Size | None = None
    ) -> torch.Tensor:
        """Return [tokens of this engine, hidden size].

        Each result comes from one engine, and the others add zeros to it: the sum over engines rounds nothing.
        """
        rows = super().finalize(hidden_states, reduce_results, padded_hidden_states_shape)
        config, weights = self.moe_config, self._dispatcher.weights
        own = weights.view(config.dp_size, -1, weights.shape[1])[get_dp_group().rank_in_group][: len(rows)]
        return DeviceOperator.npu_moe_token_unpermute(
            permuted_tokens=rows.view(own.numel(), -1),
            sorted_indices=torch.arange(own.numel(), dtype=torch.int32, device=rows.device),
            probs=own.contiguous(),
        )


def add_experts_in_order() -> None:
    """Change the layers' all-gather method of communication if experts are spread over engines alone."""
    method = get_moe_comm_method(MoECommType.ALLGATHER)
    if method is None or type(method.token_dispatcher) is not FiniteCombine:
        return  # a model without experts, or a chip whose dispatcher is another one
    config = method.moe_config
    if config.dp_size == 1 or config.ep_size != config.dp_size:
        return  # all experts are here, or tensor parallel ranks add up the rest
    dispatcher = RowsOfExperts(
        top_k=config.experts_per_token, num_experts=config.num_experts, num_local_experts=config.num_local_experts
    )
    method.token_dispatcher, method.prepare_finalize = dispatcher, SumInOrder(config, dispatcher)
