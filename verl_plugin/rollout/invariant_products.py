"""Products that vLLM-Ascend's batch-invariant mode leaves out, from the operators of its own package.

The mode replaces `aten::mm` and `aten::matmul`. It leaves out `npu_grouped_matmul`, the products of experts, and, where
Triton is missing, `aten::linear` with a bias. Here both are computed by `batch_invariant_ops`, whose results for a row
do not depend on the number of rows. Kernels are registered with PyTorch's dispatcher, as the mode registers its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_DEVICE = "PrivateUse1"
_GROUPED = "npu_grouped_matmul"
_ROWS, _COUNTS = 0, 1  # CANN's group_type for groups of rows, and its group_list_type for numbers of rows
# Arguments of quantised products.
_QUANTISED = ("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale")


@cache
def replace_products() -> list[torch.library.Library]:
    """Replace `aten::linear` and `npu_grouped_matmul` on the device of this process, once.

    Returns:
        Libraries that hold the replacements; PyTorch's own kernels are back when they are freed.

    Raises:
        ImportError: the package of the operators is missing.
    """
    require_operators("VLLM_BATCH_INVARIANT=1")
    return [replace_linear(), replace_grouped_matmul()]


def require_operators(setting: str) -> None:
    """Raise ImportError, with the setting that needs them, if the package `batch_invariant_ops` is missing."""
    # Upstream's own mode only warns: docs/upstream/vllm-ascend-batch-invariant-missing.md.
    try:
        import batch_invariant_ops  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{setting} is invalid: the package batch_invariant_ops is not installed. Unset it, or build vllm-ascend "
            "with VLLM_BATCH_INVARIANT=1."
        ) from error


def replace_linear() -> torch.library.Library:
    """Replace `aten::linear` outside of autograd."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("linear", linear, _DEVICE)
    return library


def linear(self: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by the weight, then add the bias: [..., inner] and [columns, inner] give [..., columns]."""
    product = torch.ops.batch_invariant_ops.npu_matmul_batch_invariant(self, weight.t())
    return product if bias is None else product + bias


def replace_grouped_matmul() -> torch.library.Library:
    """Replace `npu_grouped_matmul` for groups of rows. Other groups, as in gradients of weights, stay CANN's."""
    upstream = torch.library.get_kernel(f"npu::{_GROUPED}", _DEVICE)
    library = torch.library.Library("npu", "IMPL")

    def grouped_matmul(keys: Any, x: Sequence[Tensor], weight: Sequence[Tensor], **named: Any) -> list[Tensor]:
        if named.get("group_type") != _ROWS:
            return list(upstream.call_boxed(keys, x, weight, **named))
        return [products_of_experts(x, weight, **named)]

    library.impl(_GROUPED, grouped_matmul, _DEVICE, with_keyset=True)
    return library


def products_of_experts(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor,
    group_list_type: int = 0,
    **named: Any,
) -> Tensor:
    """Multiply the rows of each expert by its weight, as npu_grouped_matmul for groups of rows.

    The number of rows of an expert is read by the host. A graph cannot wait for the host: while one is captured, each
    expert multiplies all rows, and its own are kept. Both give the same bits, since a row's product depends on the row
    and the weight alone. It may depend on the weight's layout in memory, which training has transposed: a weight that
    is not contiguous is copied.

    Args:
        x: one tensor, the rows sorted by expert, [rows, inner].
        weight: one tensor [experts, inner, columns], or one [inner, columns] for each expert.
        bias: the same for biases, without `inner`; None for none.
        group_list: whole numbers, [experts].
        group_list_type: 0: where each expert's rows end; 1: how many it has.

    Returns:
        [rows, columns], zero in rows that no expert has.

    Raises:
        NotImplementedError: the weights are quantised, or the call is of another form.
    """
    quantised = [name for name in _QUANTISED if named.get(name) is not None]
    if quantised or len(x) != 1 or group_list_type not in (0, _COUNTS):
        raise NotImplementedError(
            f"{_GROUPED} with {', '.join(quantised) or f'{len(x)} inputs, group_list_type {group_list_type}'} has no "
            "batch-invariant form. Set VLLM_BATCH_INVARIANT to 0, or use weights that are not quantised."
        )
    rows, weights = x[0], _of_experts(weight, 2)
    biases = None if bias is None else _of_experts(bias, 1)
    output = rows.new_zeros(rows.shape[0], weights[0].shape[-1])
    is_captured = torch.npu.is_current_stream_capturing()
    parts = _masks(group_list, group_list_type, len(rows)) if is_captured else _ranges(group_list, group_list_type)
    for expert, part in parts:
        own = rows if is_captured else rows[part]
        product = torch.ops.batch_invariant_ops.npu_mm_batch_invariant(own, weights[expert].contiguous())
        if biases is not None:
            product = (product + biases[expert]).to(product.dtype)
        if is_captured:
            output = torch.where(part, product, output)
        else:
            output[part] = product
    return output


def _of_experts(given: Sequence[Tensor], dims: int) -> Sequence[Tensor]:
    """Return one tensor of `dims` dimensions for each expert."""
    return given[0].unbind() if len(given) == 1 and given[0].dim() > dims else given


def _ranges(group_list: Tensor, list_type: int) -> Iterator[tuple[int, slice]]:
    """Yield the rows of each expert that has any; waits for the device."""
    start = 0
    for expert, number in enumerate(group_list.tolist()):
        end = start + number if list_type == _COUNTS else number
        if end > start:
            yield expert, slice(start, end)
        start = end


def _masks(group_list: Tensor, list_type: int, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield which rows each expert has, bool [rows, 1], without waiting for the device."""
    ends = group_list.cumsum(0) if list_type == _COUNTS else group_list
    places = torch.arange(rows, device=group_list.device, dtype=ends.dtype)
    is_before_end = places.unsqueeze(0) < ends.unsqueeze(1)
    for expert in range(len(ends)):
        is_own = is_before_end[expert] & ~is_before_end[expert - 1] if expert else is_before_end[expert]
        yield expert, is_own.unsqueeze(1)
