"""Activations, gated ones included, and the masked softmax."""

import torch
from torch import Tensor
from torch.nn import functional

from .registry import operator


@operator("npu_swiglu(Tensor self, int dim=-1) -> Tensor", differentiable=True)
def npu_swiglu(x: Tensor, dim: int = -1):
    """``silu(gate) * up`` of the halves of `x` along `dim`, computed in float32 and rounded once."""
    # One half as float32 at a time: what an operator allocates is charged to the device.
    gate, up = x.chunk(2, dim)
    return (functional.silu(gate.float()) * up).to(x.dtype)


@operator("npu_swiglu_backward(Tensor grad, Tensor self, int dim=-1) -> Tensor")
def npu_swiglu_backward(gradient: Tensor, x: Tensor, dim: int = -1):
    """The gradient of npu_swiglu: ``gradient * up * silu'(gate)`` and ``gradient * silu(gate)``, in float32.

    What the operator does is on the page of aclnnSwiGluGrad; torch_npu has none for it.
    """
    gate, up = x.float().chunk(2, dim)
    open_part = gate.sigmoid()
    of_gate = gradient.float() * up * open_part * (1 + gate * (1 - open_part))
    return torch.cat((of_gate, gradient.float() * gate * open_part), dim).to(x.dtype)


@operator("npu_silu(Tensor self) -> Tensor", differentiable=True)
def npu_silu(x: Tensor):
    return functional.silu(x)


@operator("npu_gelu(Tensor self, *, str approximate='none') -> Tensor", differentiable=True)
def npu_gelu(x: Tensor, *, approximate: str = "none"):
    return functional.gelu(x, approximate=approximate)


@operator("npu_gelu_backward(Tensor grad_output, Tensor input, *, str approximate='none') -> Tensor")
def npu_gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none"):
    return torch.ops.aten.gelu_backward(gradient.float(), x.float(), approximate=approximate).to(x.dtype)


@operator("npu_fast_gelu(Tensor self) -> Tensor", differentiable=True)
def npu_fast_gelu(x: Tensor):
    wide = x.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


@operator(
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor",
    differentiable=True,
)
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False):
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    scores = (x.float() * scale).masked_fill(mask.bool(), -10000.0)
    return scores.softmax(-1).to(x.dtype)
