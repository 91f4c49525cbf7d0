"""Refresh the absorbed MLA weights of vLLM-Ascend: derived copies of kv_b_proj that must follow every change of it.

AscendMLAImpl keeps, beside kv_b_proj (heads x (nope + value), latent), a key part `W_UK_T` (heads, nope, latent) and a
value part `W_UV` (heads, latent, value). Upstream makes them once, after loading.
"""

from collections.abc import Iterator

import torch
from torch import nn

ABSORBED = ("W_UV", "W_UK_T")


def absorbed_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield every derived weight of `model`. They are plain attributes, not parameters, and must be searched for."""
    for module in model.modules():
        implementation = getattr(module, "impl", None)
        for name in ABSORBED:
            if hasattr(implementation, name):
                yield getattr(implementation, name)


def refresh_absorbed_weights(model: nn.Module) -> int:
    """Rebuild the absorbed weights of every MLA layer from kv_b_proj and return how many layers were refreshed.

    They are written in place when shape, type and device still fit, so that compiled graphs keep their addresses.
    Raises TypeError for a quantised kv_b_proj, which has no plain weight to read.
    """
    attention = [getattr(module, "impl", None) for module in model.modules()]
    layers = [impl for impl in attention if impl is not None and hasattr(impl, "W_UK_T")]
    with torch.no_grad():
        for impl in layers:
            weight = impl.kv_b_proj.weight.data
            if not weight.is_floating_point():
                raise TypeError(f"kv_b_proj is {weight.dtype}: absorbed weights of quantised layers are not rebuilt")
            by_head = weight.view(impl.num_heads, impl.qk_nope_head_dim + impl.v_head_dim, impl.kv_lora_rank)
            key, value = by_head.split([impl.qk_nope_head_dim, impl.v_head_dim], dim=1)
            impl.W_UK_T = _written(impl.W_UK_T, key)
            impl.W_UV = _written(impl.W_UV, value.transpose(1, 2))
    return len(layers)


def _written(kept: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    reusable = kept.shape == values.shape and kept.dtype == values.dtype and kept.device == values.device
    if reusable and kept.untyped_storage().size() >= kept.numel() * kept.itemsize:
        return kept.copy_(values)
    return values.contiguous()
