"""Methods of torch.Tensor that have to know about the NPU."""

import torch
from torch import Tensor

from npu_emulator import _C


def _is_pinned(self: Tensor, device=None) -> bool:
    return self.device.type == "cpu" and _C.is_pinned(self)


def _pin_memory(self: Tensor, device=None) -> Tensor:
    if self.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    if _C.is_pinned(self):
        return self
    pinned = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, pin_memory=True)
    return pinned.copy_(self)


def _record_stream(self: Tensor, stream) -> None:
    """Memory is never reused while a stream still needs it, so there is nothing to record."""


def install() -> None:
    Tensor.is_pinned = _is_pinned
    Tensor.pin_memory = _pin_memory
    Tensor.record_stream = _record_stream
