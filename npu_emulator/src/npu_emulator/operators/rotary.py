"""Rotary position embeddings. "half" pairs element i with i + d/2, "interleave" pairs 2i with 2i + 1."""

from collections.abc import Callable

import torch
from torch import Tensor

from .registry import operator


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_interleaved(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def deinterleave(x: Tensor) -> Tensor:
    """Even elements first, then the odd ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def turn(x: Tensor, cos: Tensor, sin: Tensor, rotate: Callable[[Tensor], Tensor] = rotate_half) -> Tensor:
    """``x * cos + rotate(x) * sin`` in the type of `x`, computed in float32 and rounded once."""
    wide = x.float()
    return (wide * cos.float() + rotate(wide) * sin.float()).to(x.dtype)


@operator("npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor", differentiable=True)
def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half"):
    if rotary_mode not in ("half", "interleave"):
        raise RuntimeError(f"The rotary_mode of npu_rotary_mul should be half or interleave, but got {rotary_mode}")
    return turn(x, cos, sin, rotate_half if rotary_mode == "half" else rotate_interleaved)


@operator("npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor")
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor):
    return turn(deinterleave(x), cos, sin)


@operator(
    "npu_apply_rotary_pos_emb(Tensor(a!) query, Tensor(b!) key, Tensor cos, Tensor sin, str layout='BSH') "
    "-> (Tensor(a!), Tensor(b!))"
)
def npu_apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSH"):
    for states in (query, key):
        states.copy_(turn(states, cos, sin))
    return query, key


def rotate_by_table(states: Tensor, rows: Tensor, head_size: int, half: bool) -> Tensor:
    """States [tokens, ..., heads * head_size] rotated by rows [tokens, d] of a table of cosines, then sines."""
    heads = states.reshape(rows.shape[0], -1, head_size)
    rotated_size = rows.shape[-1]
    cos, sin = rows.float().unsqueeze(1).chunk(2, -1)
    part = heads[..., :rotated_size].float()
    first, second = part.chunk(2, -1) if half else (part[..., ::2], part[..., 1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)
    return torch.cat((turned.to(states.dtype), heads[..., rotated_size:]), -1).reshape(states.shape)


@operator(
    "_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox_style) -> ()",
    namespace="atb",
)
def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
):
    rows = cos_sin_cache[positions.flatten()]
    for states in (query, key):
        states.copy_(rotate_by_table(states, rows, head_size, is_neox_style))


@operator(
    "npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
    "int[]? mrope_section=None, str? rotary_mode='half') -> (Tensor, Tensor)"
)
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str = "half",
):
    rows = cos_sin_cache[positions]
    if positions.dim() == 2:
        sections = [size for size in mrope_section]
        cos, sin = (part.split(sections, -1) for part in rows.chunk(2, -1))
        rows = torch.cat(
            [*(part[axis] for axis, part in enumerate(cos)), *(part[axis] for axis, part in enumerate(sin))], -1
        )
    half = rotary_mode == "half"
    return rotate_by_table(query, rows, head_size, half), rotate_by_table(key, rows, head_size, half)
