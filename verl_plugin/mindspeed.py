"""Bridges for verl's engine with MindSpeed, whose layers stand in for TransformerEngine's on an NPU.

mbridge 0.15.1 cannot read a configuration of transformers 5, with which verl 0.9.1 is installed. MindSpeed is in no
package registry: it and Megatron-LM (core_r0.16.0 of both) are checkouts on PYTHONPATH.

    actor_rollout_ref.model.external_lib=verl_plugin.mindspeed
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before Megatron-core, which mbridge imports)

# isort: split
import torch
from mbridge.core import LLMBridge, register_model
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from mindspeed.patch_utils import MindSpeedPatchesManager
from mindspeed.te.pytorch.module.linear import TELinear
from torch import nn

from verl_plugin.bridges import BridgeOfTransformers5, DeepseekV3OfTransformers5
from verl_plugin.mindspeed_layers import overlap_problem

_PERMUTE = "megatron.core.transformer.moe.moe_utils.permute"


class OfMindSpeed(LLMBridge):
    """Repairs three defects of MindSpeed's layers, two of which need several tensor parallel ranks.

    - The fused permutation keeps the type of the router's weights: docs/upstream/mindspeed-fused-permutation-rounds.md.
    - Shared experts do not overlap with the exchange of tokens: docs/upstream/mindspeed-shared-expert-overlap.md.
    - Weights that every rank has whole lose the mark of those that are cut. The norm of gradients would count them once
      on each rank, and mbridge export them several times: docs/upstream/mindspeed-duplicated-linear.md.
    """

    def _build_base_config(self, **kwargs: Any) -> Any:
        if "moe_shared_expert_overlap" in kwargs:  # mbridge's own choice; the user's key still comes after it
            kwargs["moe_shared_expert_overlap"] = False
        config = super()._build_base_config(**kwargs)
        problem = overlap_problem(config.moe_shared_expert_overlap, config.tensor_model_parallel_size)
        if problem:
            raise ValueError(problem)
        return config

    def get_model(self, *args: Any, **kwargs: Any) -> Any:
        """Build the model as upstream does, with the permutation wrapped and whole weights not marked as cut."""
        _keep_router_weights()
        models = super().get_model(*args, **kwargs)
        for model in models:
            _unmark_whole_weights(model)
        return models


def _keep_router_weights() -> None:
    """Wrap the fused permutation if MindSpeed has replaced Megatron-core's with it."""
    if _PERMUTE in MindSpeedPatchesManager.patches_info:
        MindSpeedPatchesManager.register_patch(_PERMUTE, keeping_weights_wrapper)
        MindSpeedPatchesManager.apply_patches()


def keeping_weights_wrapper(permute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `permute` that does not round float32 weights to the type of the tokens.

    MindSpeed's converts nothing if tokens and weights are both float32. Its patch manager takes a function for a
    wrapper, and not for a replacement, if the name ends with "wrapper".
    """

    @functools.wraps(permute)
    def keeping(
        tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor | None = None, **named: Any
    ) -> Any:
        if probs is None or probs.dtype != torch.float32:
            return permute(tokens, routing_map, probs=probs, **named)
        rows, *others = permute(tokens.float(), routing_map, probs=probs, **named)
        return rows.to(tokens.dtype), *others

    return keeping


def _unmark_whole_weights(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, TELinear) and layer.parallel_mode == "duplicated":
            layer.weight.tensor_model_parallel = False


@register_model("qwen3")
class MindSpeedQwen3Bridge(OfMindSpeed, BridgeOfTransformers5, Qwen3Bridge):
    """Qwen3, dense."""


@register_model("qwen3_moe")
class MindSpeedQwen3MoEBridge(OfMindSpeed, BridgeOfTransformers5, Qwen3MoEBridge):
    """Qwen3 with experts."""


@register_model("deepseek_v3")
class MindSpeedDeepseekV3Bridge(OfMindSpeed, DeepseekV3OfTransformers5):
    """DeepSeek-V3."""

    def _build_base_config(self, **kwargs: Any) -> Any:
        config = super()._build_base_config(**kwargs)
        # MindSpeed's latent attention, which ranks that share sequences need, reads YaRN's length by its earlier name
        # (core/transformer/multi_head_latent_attention/adaptor.py).
        config.max_position_embeddings = config.original_max_position_embeddings
        return config
