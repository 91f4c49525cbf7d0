"""Keep a router's bias for choosing experts in float32, whatever the type of its model.

DeepSeek-V3 publishes values near 5 in float32, where neighbouring bfloat16 numbers are 0.016 to 0.031 apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # families of models are listed without torch, from all modules of this folder
    from torch import nn

EXPERT_BIAS = "expert_bias"
"""The buffer's name in the routers of this project and of MindSpeed-LLM."""


@contextmanager
def float32_expert_bias(model: nn.Module) -> Iterator[None]:
    """Keep every `expert_bias` of `model` float32 while the block casts or moves the model; its device may change."""
    import torch

    kept = {
        module: module._buffers[EXPERT_BIAS]
        for module in model.modules()
        if module._buffers.get(EXPERT_BIAS) is not None
    }
    yield
    for module, bias in kept.items():
        assert bias is not None
        module._buffers[EXPERT_BIAS] = bias.to(module._buffers[EXPERT_BIAS].device, torch.float32)
