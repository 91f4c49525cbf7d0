"""The values that the head of a critic on Megatron begins with, where it begins from a model with an output layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def begin_head(tensors: Mapping[str, torch.Tensor], deviation: float, seed: int) -> None:
    """Fill the head, if these are tensors of the stage that has it, as transformers fills one: the weight from a normal
    distribution of this standard deviation, the bias with 0. The same in every layout.

    tensors: by Megatron's local name.
    """
    drawn = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("output_layer.weight"):
            values = torch.empty(tensor.shape).normal_(0.0, deviation, generator=drawn)
            tensor.data.copy_(values)
        elif name.endswith("output_layer.bias"):
            tensor.data.zero_()
