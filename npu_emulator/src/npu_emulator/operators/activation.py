"""Activations, gated ones included, and the masked softmax."""

import torch
from torch import Tensor
from torch.nn import functional

from .registry import operator


@operator("npu_swiglu(Tensor self, int dim=-1) -> Tensor", differentiable=True)
def npu_swiglu(x: Tensor, dim: int = -1):
    gate, up = x.chunk(2, dim)
    return functional.silu(gate) * up


@operator("npu_silu(Tensor self) -> Tensor", differentiable=True)
def npu_silu(x: Tensor):
    return functional.silu(x)


@operator("npu_gelu(Tensor self, *, str approximate='none') -> Tensor", differentiable=True)
def npu_gelu(x: Tensor, *, approximate: str = "none"):
    return functional.gelu(x, approximate=approximate)


@operator("npu_fast_gelu(Tensor self) -> Tensor", differentiable=True)
def npu_fast_gelu(x: Tensor):
    return x * torch.sigmoid(1.702 * x)


@operator(
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor",
    differentiable=True,
)
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False):
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    scores = (x.float() * scale).masked_fill(mask.bool(), -10000.0)
    return scores.softmax(-1).to(x.dtype)
