"""Initial values of the head of a critic on Megatron that starts from a model with an output layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def begin_head(tensors: Mapping[str, torch.Tensor], deviation: float, seed: int) -> None:
    """Initialise the head, if these tensors contain it, as transformers does; the same in every layout.

    Args:
        tensors: by Megatron's local name.
        deviation: the weight is drawn from a normal distribution of this standard deviation; the bias is 0.
        seed: of the draw.
    """
    drawn = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("output_layer.weight"):
            values = torch.empty(tensor.shape).normal_(0.0, deviation, generator=drawn)
            tensor.data.copy_(values)
        elif name.endswith("output_layer.bias"):
            tensor.data.zero_()
