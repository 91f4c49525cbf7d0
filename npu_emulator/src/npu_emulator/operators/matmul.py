"""Matrix products of groups of rows, each with a weight of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .registry import operator


def group_sizes(group_list, group_list_type: int, groups: int) -> list[int]:
    """Rows of each group from their running totals (type 0) or their numbers (type 1)."""
    values = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    if len(values) != groups:
        raise RuntimeError(f"npu_grouped_matmul: group_list has {len(values)} entries for {groups} groups")
    if group_list_type == 1:
        return values
    return [stop - start for start, stop in zip([0, *values[:-1]], values)]


def multiply_groups(x: Tensor, weights: Sequence[Tensor], sizes: list[int]) -> Tensor:
    """Rows of `x`, group after group, times the weight of their group. Rows after the last group give zeros."""
    used = sum(sizes)
    product = (
        x.new_zeros(x.shape[0], weights[0].shape[-1])
        if used < x.shape[0]
        else x.new_empty(x.shape[0], weights[0].shape[-1])
    )
    rows, results = x[:used].split(sizes), product[:used].split(sizes)
    for size, row, weight, result in zip(sizes, rows, weights, results):
        if size:
            torch.mm(row, weight, out=result)
    return product


def sum_groups(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """For each group of consecutive columns of `x` [m, tokens] and rows of `weight` [tokens, n], their product [m, n]."""
    product = x.new_zeros(len(sizes), x.shape[0], weight.shape[-1])
    columns, rows = x[:, : sum(sizes)].split(sizes, 1), weight[: sum(sizes)].split(sizes)
    for size, column, row, result in zip(sizes, columns, rows, product):
        if size:
            torch.mm(column, row, out=result)
    return product


@operator(
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
    "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
    "Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0, "
    "int? act_type=0, ScalarType? output_dtype=None) -> Tensor[]"
)
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: torch.dtype | None = None,
    **quantisation,
):
    given = [name for name, value in quantisation.items() if value is not None]
    if given or act_type:
        raise NotImplementedError(f"npu_grouped_matmul: {', '.join(given) or 'act_type'} is not emulated")
    if group_type == 2:
        return [sum_groups(x[0], weight[0], group_sizes(group_list, group_list_type, group_list.numel()))]
    if group_type not in (0, None, -1):
        raise NotImplementedError(f"npu_grouped_matmul: group_type {group_type} is not emulated")
    weights = list(weight[0].unbind(0)) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    if group_list is None:
        products = [torch.mm(rows, one) for rows, one in zip(x, weights)]
        if bias:
            products = [product + one for product, one in zip(products, bias)]
        return products if split_item in (0, 1) else [torch.cat(products)]
    if len(x) != 1 or bias:
        raise NotImplementedError("npu_grouped_matmul: group_list with several x or with a bias is not emulated")
    sizes = group_sizes(group_list, group_list_type, len(weights))
    product = multiply_groups(x[0], weights, sizes)
    product = product if output_dtype is None else product.to(output_dtype)
    return [product] if split_item in (2, 3) else list(product.split(sizes))


@operator("_npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor(a!) C) -> ()", namespace="atb")
def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, total: Tensor):
    """Adds ``x^T weight`` to a float32 total: the gradient of a linear layer's weight."""
    total.addmm_(x.t().float(), weight.float())
