"""Root mean square normalisation, alone and fused with a residual addition. Statistics are float32."""

import torch
from torch import Tensor

from .registry import operator


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x^2) + epsilon) * gamma`` over the dimensions of `gamma`, and the float32 reciprocal root."""
    dimensions = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    reciprocal_root = torch.rsqrt(wide.square().mean(dimensions, keepdim=True) + epsilon)
    return (wide * reciprocal_root * gamma.float()).to(x.dtype), reciprocal_root


@operator("npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)", differentiable=True)
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-06):
    return rms_norm(x, gamma, epsilon)


@operator(
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    differentiable=True,
)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06):
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


@operator(
    "npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)", differentiable=True
)
def npu_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-06):
    return rms_norm(x, gamma.float() + 1, epsilon)


@operator(
    "npu_layer_norm_eval(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float "
    "eps=1e-05) -> Tensor"
)
def npu_layer_norm_eval(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05
):
    return torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)
