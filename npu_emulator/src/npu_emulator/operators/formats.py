"""Formats of memory. It is always in the plain order here; a tensor only remembers the format that it was cast to."""

import enum
import warnings

import torch
from torch import Tensor

from .registry import operator


class Format(enum.IntEnum):
    """How CANN numbers the formats."""

    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    FRACTAL_Z_3D = 33


PRIVATE = {Format.NC1HWC0, Format.FRACTAL_Z, Format.FRACTAL_NZ, Format.NDC1HWC0, Format.FRACTAL_Z_3D}


class Permission:
    """Whether private formats are allowed: torch_npu.npu.config.allow_internal_format, by default not on Atlas A3."""

    private_formats = False


def _plain(x: Tensor) -> Format:
    return {4: Format.NCHW, 5: Format.NCDHW}.get(x.dim(), Format.ND)


def format_of(x: Tensor) -> Format:
    """The format of the memory of a tensor, which its views share."""
    return getattr(x.untyped_storage(), "npu_format", _plain(x))


def _wanted(x: Tensor, acl_format: int) -> Format:
    """The format to cast to: the plain one instead of a private one that is not allowed."""
    if acl_format not in set(Format):
        raise RuntimeError(f"npu_format_cast: {acl_format} is not a format")
    if acl_format in PRIVATE and not Permission.private_formats:
        warnings.warn(
            "npu_format_cast: private formats need torch_npu.npu.config.allow_internal_format; the plain one is kept",
            stacklevel=3,
        )
        return _plain(x)
    return Format(acl_format)


@operator("get_npu_format(Tensor self) -> int", shapes=lambda x: int(_plain(x)), on_device=True)
def get_npu_format(x: Tensor):
    """The number of the format. Page: torch_npu.npu_format_cast."""
    return format_of(x)


@operator(
    "npu_format_cast(Tensor self, int acl_format) -> Tensor",
    shapes=lambda x, acl_format: torch.empty_like(x),
    differentiable=True,
    on_device=True,
)
def npu_format_cast(x: Tensor, acl_format: int):
    """`x` in another format: new memory, unless the format stays or both are plain. Page: torch_npu.npu_format_cast.

    On Atlas A3 private formats are refused with a warning, and the tensor keeps its plain format, unless
    torch_npu.npu.config.allow_internal_format is set (its page).
    """
    wanted, current = _wanted(x, acl_format), format_of(x)
    if wanted == current:
        return x.view_as(x)
    cast = x.clone() if wanted in PRIVATE or current in PRIVATE else x.view_as(x)
    cast.untyped_storage().npu_format = wanted
    return cast


@operator("npu_format_cast_(Tensor(a!) self, int acl_format) -> Tensor(a!)", shapes=lambda x, _: x, on_device=True)
def npu_format_cast_(x: Tensor, acl_format: int):
    """As npu_format_cast, in place."""
    x.untyped_storage().npu_format = _wanted(x, acl_format)
    return x


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
