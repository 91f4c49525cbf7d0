"""The weights that vLLM-Ascend's MLA derives from kv_b_proj and reads instead of it while decoding.

They are plain attributes and no parameters, so they have to be looked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

ABSORBED = ("W_UV", "W_UK_T")


def absorbed_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every derived weight of `model`."""
    for module in model.modules():
        implementation = getattr(module, "impl", None)
        for name in ABSORBED:
            if hasattr(implementation, name):
                yield getattr(implementation, name)
