"""Matrix products of groups of rows, each with a weight of its own."""

from collections.abc import Sequence
from itertools import pairwise

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
    return [stop - start for start, stop in pairwise([0, *values])]


def wide(tensor: Tensor) -> Tensor:
    """Numbers of 16 bits as float32, in which products are added up and then rounded once; others as they are."""
    return tensor.float() if tensor.element_size() == 2 else tensor


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices, rounded once."""
    return torch.matmul(wide(left), wide(right)).to(left.dtype)


def multiply_groups(x: Tensor, weights: Tensor | Sequence[Tensor], sizes: list[int]) -> Tensor:
    """Rows of `x`, group after group, times the weight of their group. Rows after the last group give zeros."""
    rows = wide(x)
    product = rows.new_zeros(x.shape[0], weights[0].shape[-1])
    parts = zip(sizes, rows[: sum(sizes)].split(sizes), weights, product[: sum(sizes)].split(sizes), strict=True)
    for size, row, weight, result in parts:
        if size:
            torch.mm(row, wide(weight), out=result)
    return product.to(x.dtype)


def sum_groups(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """For each group of columns of `x` [m, tokens] and rows of `weight` [tokens, n], their product [m, n]."""
    used = sum(sizes)
    columns, rows = wide(x[:, :used]), wide(weight[:used])
    product = rows.new_zeros(len(sizes), x.shape[0], weight.shape[-1])
    for size, column, row, result in zip(sizes, columns.split(sizes, 1), rows.split(sizes), product, strict=True):
        if size:
            torch.mm(column, row, out=result)
    return product.to(x.dtype)


def _grouped_matmul_shapes(x: list[Tensor], weight: list[Tensor], **options) -> list[Tensor]:
    split_item = options.get("split_item", 0)
    if options.get("group_list") is not None and split_item not in (2, 3):
        raise NotImplementedError("npu_grouped_matmul: in a graph, split_item must be 2 or 3")
    dtype = options.get("output_dtype") or x[0].dtype
    products = [one.new_empty(one.shape[0], weight[0].shape[-1], dtype=dtype) for one in x]
    return products if split_item in (0, 1) or len(x) == 1 else [torch.cat(products)]


@operator(
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? "
    "offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? "
    "per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? "
    "activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, int? "
    "group_type=None, int? group_list_type=0, int? act_type=0, ScalarType? output_dtype=None) -> Tensor[]",
    shapes=_grouped_matmul_shapes,
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
    if group_type is None:
        raise RuntimeError("Requires manual passing group_type, current is None.")
    if group_type not in (-1, 0):
        raise RuntimeError(f"group_type currently only support -1 and 0, current value is {group_type}")
    if not len(x) or not len(weight):
        raise RuntimeError("npu_grouped_matmul: x and weight need a tensor at least")
    given = [name for name, value in quantisation.items() if value is not None]
    if given or act_type:
        raise NotImplementedError(f"npu_grouped_matmul: {', '.join(given) or 'act_type'} is not emulated")
    weights = weight[0] if len(weight) == 1 and weight[0].dim() == 3 else weight
    if group_list is None:
        products = [multiply(rows, one) for rows, one in zip(x, weights, strict=True)]
        if bias:
            products = [product + one for product, one in zip(products, bias, strict=True)]
        return products if split_item in (0, 1) else [torch.cat(products)]
    if len(x) != 1 or bias:
        raise NotImplementedError("npu_grouped_matmul: group_list with several x or with a bias is not emulated")
    sizes = group_sizes(group_list, group_list_type, len(weights))
    product = multiply_groups(x[0], weights, sizes)
    product = product if output_dtype is None else product.to(output_dtype)
    return [product] if split_item in (2, 3) else list(product.split(sizes))


@operator(
    "npu_grouped_matmul_add_(Tensor(a!) input, Tensor x, Tensor weight, Tensor group_list, *, bool transpose_x=True, "
    "bool transpose_weight=False, int group_type=2) -> Tensor(a!)"
)
def npu_grouped_matmul_add_(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
):
    """Adds, for each group of rows of `x` [tokens, m] and `weight` [tokens, n], ``x^T weight`` to a float32 total.

    `total` is [groups * m, n] and `group_list` has running totals of rows, as the page of aclnnGroupedMatmulAdd says.
    """
    if not transpose_x or transpose_weight or group_type != 2:
        raise RuntimeError(
            "npu_grouped_matmul_add_: transpose_x must be True, transpose_weight False and group_type 2, not "
            f"{transpose_x}, {transpose_weight} and {group_type}"
        )
    sizes = group_sizes(group_list, 0, group_list.numel())
    used = sum(sizes)
    sums = total.view(len(sizes), x.shape[-1], weight.shape[-1])
    pairs = zip(x[:used].float().split(sizes), weight[:used].float().split(sizes), strict=True)
    for size, (rows, columns), result in zip(sizes, pairs, sums, strict=True):
        if size:
            result.addmm_(rows.t(), columns)
    return total


@operator("_npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor(a!) C) -> ()", namespace="atb")
def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, total: Tensor):
    """Adds ``x^T weight`` to a float32 total: the gradient of a linear layer's weight."""
    total.addmm_(x.t().float(), weight.float())
