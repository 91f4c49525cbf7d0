"""Make npu_swiglu depend on the number of rows, as a kernel may that splits its work by them."""

import torch
from torch import Tensor

LIBRARY = torch.library.Library("npu", "IMPL")


def swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = self.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up * (1 + 1e-5 * self.shape[0])


LIBRARY.impl("npu_swiglu", swiglu, "PrivateUse1")
