"""Private formats. Memory here is always in the plain order, so changing the format keeps the bytes."""

import torch
from torch import Tensor

from .registry import operator

ND = 2


@operator("npu_format_cast(Tensor self, int acl_format) -> Tensor", differentiable=True)
def npu_format_cast(x: Tensor, acl_format: int):
    return x.clone()


@operator("npu_format_cast_(Tensor(a!) self, int acl_format) -> Tensor(a!)")
def npu_format_cast_(x: Tensor, acl_format: int):
    return x


@operator("get_npu_format(Tensor self) -> int")
def get_npu_format(x: Tensor):
    return ND


@operator("npu_prefetch(Tensor self, Tensor? dependency, int max_size, int offset=0) -> ()")
def npu_prefetch(x: Tensor, dependency, max_size: int, offset: int = 0):
    """Reads ahead into the cache of the device, which has no effect on results."""


@operator("npu_dtype_cast(Tensor self, ScalarType dtype) -> Tensor", differentiable=True)
def npu_dtype_cast(x: Tensor, dtype: torch.dtype):
    return x.to(dtype, copy=True)


@operator(
    "npu_confusion_transpose(Tensor self, int[] perm, int[] shape, bool transpose_first) -> Tensor", differentiable=True
)
def npu_confusion_transpose(x: Tensor, perm: list[int], shape: list[int], transpose_first: bool):
    if transpose_first:
        return x.permute(perm).reshape(shape).contiguous()
    return x.reshape(shape).permute(perm).contiguous()


@operator("scatter_update_(Tensor(a!) self, Tensor indices, Tensor updates, int axis) -> Tensor(a!)")
def scatter_update_(x: Tensor, indices: Tensor, updates: Tensor, axis: int):
    """Writes row b of `updates` into ``x[b]``, from position ``indices[b]`` of `axis` on."""
    axis %= x.dim()
    length = updates.shape[axis]
    for row, start in enumerate(indices.flatten().tolist()):
        x[row].narrow(axis - 1, start, length).copy_(updates[row])
    return x


@operator("scatter_update(Tensor self, Tensor indices, Tensor updates, int axis) -> Tensor")
def scatter_update(x: Tensor, indices: Tensor, updates: Tensor, axis: int):
    return scatter_update_(x.clone(), indices, updates, axis)
