"""FP8 weights with one scale for each block of 128 x 128, the format in which DeepSeek-V3 is published.

`weight_scale_inv[i, j]` is the factor for the e4m3 values of block (i, j): w = float32(fp8) * scale, rounded once to
bfloat16 (DeepSeek-V3, inference/kernel.py, weight_dequant).
"""

import torch

from post_training.layouts.layout import Slice

BLOCK = 128
"""Rows and columns that share a scale; the last block of a dimension may be smaller."""

_SLAB_ELEMENTS = 1 << 17
"""Elements converted at a time: their float32 scratch stays in a core's cache."""

# An e4m3 byte moved to bits 31 (sign) and 26..20 (exponent, mantissa) of a float32 is its value times 2**-120, for
# normal and subnormal numbers alike. It is several times faster than torch 2.5's own conversion.
_VALUE_SHIFT = 20
_VALUE_BITS = 0x87F00000 - (1 << 32)
_EXPONENT_GAP = 2.0**120
_NAN = 0x7F


def scale_slice(bounds: Slice) -> Slice:
    """Return the rows and columns of `weight_scale_inv` that cover this slice of the weight."""
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in bounds)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `weight_scale_inv` for a weight of this shape."""
    return tuple(-(-extent // BLOCK) for extent in shape)


def dequantise(
    values: torch.Tensor, scales: torch.Tensor, bounds: Slice, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a slice of an FP8 weight in bfloat16.

    Args:
        values: float8_e4m3fn, the slice itself, [rows, columns]; any strides.
        scales: float32, the part `scale_slice(bounds)` of `weight_scale_inv`.
        bounds: position of `values` in the whole weight.
        out: bfloat16 [rows, columns] to write into.

    Raises:
        ValueError: shapes or dtypes do not fit each other, a value is NaN, or a scale is not finite.
    """
    (first, _), (left, right) = bounds
    extents = tuple(stop - start for start, stop in bounds)
    blocks = tuple(stop - start for start, stop in scale_slice(bounds))
    if tuple(values.shape) != extents or tuple(scales.shape) != blocks:
        raise ValueError(
            f"slice {bounds} needs values {extents} and scales {blocks}, "
            f"not {tuple(values.shape)} and {tuple(scales.shape)}"
        )
    if values.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        raise ValueError(f"values must be float8_e4m3fn and scales float32, not {values.dtype} and {scales.dtype}")
    if not scales.isfinite().all():
        raise ValueError("a scale is not finite")
    if out is None:
        out = torch.empty(extents, dtype=torch.bfloat16)
    codes = values.view(torch.int8)
    height = min(max(_SLAB_ELEMENTS // max(right - left, 1), 1), BLOCK)
    scratch = torch.empty(height, right - left, dtype=torch.float32)
    row = 0
    while row < extents[0]:
        block_row = (first + row) // BLOCK
        stop = min(row + height, (block_row + 1) * BLOCK - first, extents[0])
        columns = scales[block_row - first // BLOCK].repeat_interleave(BLOCK)[left % BLOCK :][: right - left]
        _multiply(codes[row:stop], columns, scratch[: stop - row], out[row:stop])
        row = stop
    return out


def _multiply(codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> None:
    """Write bf16(float32(codes) * scales) for rows of one row of blocks; `scales` has one entry for each column."""
    if codes.numel() and codes.bitwise_and(_NAN).max() == _NAN:
        raise ValueError("an FP8 value is NaN")
    bits = scratch.view(torch.int32)
    bits.copy_(codes).bitwise_left_shift_(_VALUE_SHIFT).bitwise_and_(_VALUE_BITS)
    out.copy_(scratch.mul_(_EXPONENT_GAP).mul_(scales))
