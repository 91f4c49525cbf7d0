"""The weights that vLLM-Ascend's MLA derives from kv_b_proj and reads instead of it while decoding.

vLLM derives them once after loading. When resharding writes new weights they must be derived again, and in place, so
that whoever holds the tensors sees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

ABSORBED = ("W_UV", "W_UK_T")


def absorbing_layers(model: torch.nn.Module) -> Iterator[Any]:
    """The MLA implementations in `model` that hold derived weights."""
    for module in model.modules():
        implementation = getattr(module, "impl", None)
        if all(hasattr(implementation, name) for name in ABSORBED):
            yield implementation


def absorbed_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every derived weight of `model`."""
    for implementation in absorbing_layers(model):
        for name in ABSORBED:
            yield getattr(implementation, name)


@torch.no_grad()
def refresh_absorbed(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Derive the absorbed weights from the present kv_b_proj into the tensors that exist; returns how many layers.

    Args:
        dtype: the model's activation dtype, as vLLM passes it after loading.
    """
    layers = 0
    for implementation in absorbing_layers(model):
        held = {name: getattr(implementation, name) for name in ABSORBED}
        implementation.process_weights_after_loading(dtype)
        for name, tensor in held.items():
            tensor.copy_(getattr(implementation, name))
            setattr(implementation, name, tensor)
        layers += 1
    return layers
