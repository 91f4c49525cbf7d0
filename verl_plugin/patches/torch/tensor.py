"""Megatron-core 0.16.1 tells types of tensors apart by the names that they have on CUDA.

`Float16OptimizerWithFloat16Params`, `DistributedOptimizer` and the counting of zeros compare `param.type()` with
`torch.cuda.BFloat16Tensor` and its like, and reject `torch.npu.BFloat16Tensor`.

No extension point: the names are literals in the optimizers' constructors. On a real NPU MindSpeed wraps
`torch.Tensor.type` to the same end; `transfer_to_npu` of torch_npu replaces functions of `torch.cuda` alone.
Upstream: not reported. Remove when Megatron-core compares `param.dtype`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def apply() -> None:
    """Calls a tensor's type on the NPU by its name on CUDA; a second call does nothing."""
    upstream = torch.Tensor.type
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = upstream(tensor, *args, **kwargs)
        return found.replace("torch.npu.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = type_as_on_cuda
