"""Sampling filters."""

import torch
from torch import Tensor

from .registry import operator


@operator("npu_top_k_top_p(Tensor logits, Tensor p, Tensor k) -> Tensor")
def npu_top_k_top_p(logits: Tensor, p: Tensor, k: Tensor):
    """Logits [batch, vocabulary] with all but the top k, then all but the smallest set of mass p, at minus infinity."""
    ascending, order = logits.sort(-1)
    least_kept = ascending.gather(-1, (logits.shape[-1] - k.long()).clamp(min=0).unsqueeze(-1))
    ascending = ascending.masked_fill(ascending < least_kept, float("-inf"))
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - p.unsqueeze(-1)
    outside[..., -1] = False
    ascending = ascending.masked_fill(outside, float("-inf"))
    return torch.empty_like(ascending).scatter_(-1, order, ascending)
