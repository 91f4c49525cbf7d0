"""The operators that torch_npu adds to torch, each written from its documentation as plain torch on the host."""

from . import (  # noqa: F401
    activation,
    attention,
    collective_matmul,
    expert_exchange,
    extension_kernels,
    formats,
    fusion_attention_gradient,
    inference_attention,
    key_value_cache,
    matmul,
    mixture_of_experts,
    normalization,
    optimizer,
    rotary,
    sampling,
)
from .registry import emulated, exposed  # noqa: F401
