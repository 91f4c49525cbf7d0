"""Patches of the vision tower of Qwen2.5-VL in transformers for an NPU: rotary embedding, and patches as one matmul."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlay import replace
from verl_patches.features.compatibility.feature import IMAGES

if TYPE_CHECKING:
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionPatchEmbed

_MODEL = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"


@replace(
    f"{_MODEL}:apply_rotary_pos_emb_flashatt",
    feature=IMAGES,
    why="it halves cosines and sines for flash_attn, but the NPU's operator, which transformers calls instead, needs "
    "whole ones: every forward with an image fails",
    upstream="https://github.com/huggingface/transformers/pull/38491",
    remove_when="the pinned transformers gives npu_rotary_mul cosines as wide as a head",
)
def apply_rotary_pos_emb_flashatt(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves of each head in float32.

    Args:
        q, k: [1, patches, heads, width of a head].
        cos, sin: [patches, width of a head], whose halves are equal.
    """
    from torch_npu import npu_rotary_mul

    cosines, sines = (each.float()[None, :, None] for each in (cos, sin))
    turned = (npu_rotary_mul(each.float(), cosines, sines).type_as(each) for each in (q, k))
    return next(turned), next(turned)


@replace(
    f"{_MODEL}:Qwen2_5_VisionPatchEmbed.forward",
    feature=IMAGES,
    why="patches do not overlap, so their convolution is one matrix product, as vLLM-Ascend computes it in the "
    "rollout; torch_npu uses CANN's older interface for the gradient of the convolution",
    upstream="not forwarded: transformers computes it so for every device",
    remove_when="the pinned transformers multiplies patches with the weight",
)
def forward(self: Qwen2_5_VisionPatchEmbed, hidden_states: torch.Tensor) -> torch.Tensor:
    """Embed patches [patches, channels * frames * height * width] as [patches, width of the tower]."""
    from torch.nn import functional

    weight = self.proj.weight
    return functional.linear(hidden_states.to(weight.dtype), weight.flatten(1))
