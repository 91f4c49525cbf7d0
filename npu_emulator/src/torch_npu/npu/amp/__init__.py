"""Mixed precision on the NPU."""

import functools

import torch

from .autocast_mode import autocast
from .grad_scaler import GradScaler

custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="npu")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="npu")

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]
