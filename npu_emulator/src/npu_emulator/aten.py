"""Operators of torch itself whose CPU kernels do not take what an NPU takes."""

import torch
from torch import Tensor

from . import _C

_library = torch.library.Library("aten", "IMPL")


def _integer_histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """torch.histc, for whole numbers too."""
    host = _C.host_alias(values)
    counts = torch.histc(host if host.is_floating_point() else host.double(), bins, min, max)
    return counts.to(device=values.device, dtype=values.dtype)


_library.impl("histc", _integer_histc, "PrivateUse1")
