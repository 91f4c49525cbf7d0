"""Large tensors in parts, because kernels and copies of a device may count elements in 32 bits.

The gradients of 8 expert layers of DeepSeek-V3 are one buffer of 2,818,572,288 floats, and as bytes four times as many
elements. CANN does not document up to which size its kernels are right, so no call here sees 2**30 elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

PART_ELEMENTS = 2**29
"""Elements of one copy or fill: well below 2**31, and enough to make the cost of starting a call negligible."""


def parts_of(tensor: torch.Tensor, elements: int | None = None) -> Iterator[torch.Tensor]:
    """Yield views that together cover `tensor` in order, cut along its first dimension where possible.

    Args:
        tensor: of any shape and stride; nothing is copied.
        elements: the most that a part holds; None is `PART_ELEMENTS`.
    """
    most = PART_ELEMENTS if elements is None else elements
    if tensor.numel() <= most:
        yield tensor
    elif rows := most * len(tensor) // tensor.numel():
        yield from tensor.split(rows)
    else:  # a single row is too large
        for row in tensor:
            yield from parts_of(row, most)


def copy_in_parts(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """Do `target.copy_(source)` part by part.

    Raises:
        ValueError: the shapes differ.
    """
    if target.shape != source.shape:
        raise ValueError(f"a copy of shape {tuple(source.shape)} does not fit a tensor of {tuple(target.shape)}")
    for to, of in zip(parts_of(target), parts_of(source), strict=True):
        to.copy_(of, non_blocking=non_blocking)


def zero_in_parts(tensor: torch.Tensor) -> None:
    """Do `tensor.zero_()` part by part."""
    for part in parts_of(tensor):
        part.zero_()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` in ordinary host memory, made part by part."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_in_parts(copied, tensor)
    return copied
