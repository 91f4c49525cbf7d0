"""Experts of one rank as grouped matrix products on the NPU, without the grouped_gemm library."""

from typing import Any

import torch
import torch_npu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

from post_training.models.megatron.moe_config import MoETransformerConfig

_GROUPS_ARE_COUNTS = 1
"""group_list_type in which the group list holds the number of rows of each group."""

_ONE_OUTPUT_TENSOR = 3
"""split_item in which input and output are single tensors, cut by the group list."""

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class _GroupedMatmul(torch.autograd.Function):
    """Rows of group ``e`` times weight ``e``, with the gradients as grouped products too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, counts)
        return _grouped_product(rows, weights, counts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weights, counts = ctx.saved_tensors
        gradient = gradient.contiguous()
        row_gradient = _grouped_product(gradient, weights.transpose(1, 2), counts)
        return row_gradient, _grouped_outer_product(rows, gradient, counts), None


def _grouped_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if rows.shape[0] == 0:
        return rows.new_zeros(0, weights.shape[-1])
    return torch_npu.npu_grouped_matmul(
        [rows],
        [weights],
        group_list=counts,
        split_item=_ONE_OUTPUT_TENSOR,
        group_type=0,
        group_list_type=_GROUPS_ARE_COUNTS,
    )[0]


def _grouped_outer_product(rows: torch.Tensor, gradient: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply the transposed rows of each group by its rows of `gradient`: [groups, k, m] in the type of `rows`.

    ``npu_grouped_matmul`` of torch_npu 2.5.1 cannot split this axis (group_type 2). ``npu_grouped_matmul_add_`` splits
    only this one: it adds products of 16-bit types to a float32 total, with groups given by cumulative counts.
    """
    groups, shape = counts.shape[0], (rows.shape[-1], gradient.shape[-1])
    if rows.shape[0] == 0:
        return rows.new_zeros(groups, *shape)
    if rows.dtype not in _SIXTEEN_BITS:
        sizes = counts.tolist()
        pairs = zip(rows.split(sizes), gradient.split(sizes), strict=True)
        return torch.stack([part.t() @ part_gradient for part, part_gradient in pairs])
    total = torch.zeros(groups * shape[0], shape[1], dtype=torch.float32, device=rows.device)
    torch_npu.npu_grouped_matmul_add_(total, rows, gradient, counts.cumsum(0), transpose_x=True, group_type=2)
    return total.view(groups, *shape).to(rows.dtype)


def grouped_matmul(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply each group of consecutive ``rows`` by its own matrix.

    ``rows`` [n, k], ``weights`` [groups, k, m], ``counts`` int64 [groups] on the device with sum ``n``; returns [n, m].
    Groups may be empty, and so may all of them: the result then still belongs to the autograd graph, because the
    collective that follows in the backward pass has to run on every rank.
    """
    return _GroupedMatmul.apply(rows, weights, counts)


class GroupedExperts(torch.nn.Module):
    """The routed experts that this rank holds, each a gated feed-forward network (SwiGLU, arXiv:2002.05202).

    Memory order is that of megatron-core's ``GroupedMLP``: ``weight1`` [hidden, local * 2 * width] read as
    [local, hidden, 2 * width] with the gate before the up projection, ``weight2`` [local * width, hidden] read as
    [local, width, hidden].
    """

    def __init__(self, config: MoETransformerConfig, local_experts: int) -> None:
        super().__init__()
        self._local_experts = local_experts
        self._hidden_size = config.hidden_size
        width = config.moe_ffn_hidden_size
        device = torch.device("npu", torch.npu.current_device())

        def parameter(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))

        self.weight1 = parameter(config.hidden_size, local_experts * 2 * width)
        self.weight2 = parameter(local_experts * width, config.hidden_size)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                config.init_method(self.weight1)
                config.output_layer_init_method(self.weight2)
        for weight, sharded_axis in ((self.weight1, 1), (self.weight2, 0)):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=sharded_axis, stride=1)
            # False sends the gradient to the data-modulo-expert-parallel group and to its own optimizer.
            weight.allreduce = config.expert_model_parallel_size == 1

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """[n, hidden] ordered by local expert, with int64 ``counts`` [local experts], to [n, hidden]."""
        gate_up = self.weight1.view(self._local_experts, self._hidden_size, -1)
        down = self.weight2.view(self._local_experts, -1, self._hidden_size)
        activated = torch_npu.npu_swiglu(grouped_matmul(rows, gate_up, counts), dim=-1)
        return grouped_matmul(activated, down, counts)
