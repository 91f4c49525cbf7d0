"""Bridges for verl's engine with MindSpeed, whose layers stand in for TransformerEngine's on an NPU.

mbridge 0.15.1 cannot read a configuration of transformers 5, with which verl 0.9.1 is installed. MindSpeed is in no
package registry: it and Megatron-LM (core_r0.16.0 of both) are checkouts on PYTHONPATH.

    actor_rollout_ref.model.external_lib=verl_plugin.mindspeed

DeepSeek-V3 needs `tensor_model_parallel_size=1`: docs/upstream/mindspeed-duplicated-linear.md.
"""

from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before Megatron-core, which mbridge imports)

# isort: split
from mbridge.core import register_model
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge

from verl_plugin.bridges import BridgeOfTransformers5, DeepseekV3OfTransformers5


@register_model("qwen3")
class MindSpeedQwen3Bridge(BridgeOfTransformers5, Qwen3Bridge):
    """Qwen3, dense."""


@register_model("qwen3_moe")
class MindSpeedQwen3MoEBridge(BridgeOfTransformers5, Qwen3MoEBridge):
    """Qwen3 with experts."""


@register_model("deepseek_v3")
class MindSpeedDeepseekV3Bridge(DeepseekV3OfTransformers5):
    """DeepSeek-V3."""

    def _build_base_config(self, **kwargs: Any) -> Any:
        config = super()._build_base_config(**kwargs)
        # MindSpeed's latent attention, which ranks that share sequences need, reads YaRN's length by its earlier name
        # (core/transformer/multi_head_latent_attention/adaptor.py).
        config.max_position_embeddings = config.original_max_position_embeddings
        return config
