"""The name under which later megatron-core releases keep the configuration of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay import add
from verl_patches.features.compatibility.feature import VERL_ON_MEGATRON_CORE

if TYPE_CHECKING:
    from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig


@add(
    "megatron.core.transformer:MLATransformerConfig",
    feature=VERL_ON_MEGATRON_CORE,
    why="verl.models.mcore.config_converter imports it from megatron.core.transformer",
    upstream="not forwarded: specific to this pair of releases; megatron-core has it since 0.10",
    remove_when="the pinned megatron-core is 0.10 or later",
    evidence="executed",
)
def mla_transformer_config(module: ModuleType) -> Callable[..., DeepseekV3TransformerConfig]:
    def MLATransformerConfig(**fields: Any) -> DeepseekV3TransformerConfig:
        """This project's configuration of DeepSeek-V3."""
        # Its module needs megatron.core.transformer, whose import is not complete when this is added.
        from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig

        return DeepseekV3TransformerConfig(**fields)

    return MLATransformerConfig
