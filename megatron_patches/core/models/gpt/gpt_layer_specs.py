"""Layer specs under the names that verl 0.4.0 imports."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from overlay import add
from verl_patches.features.compatibility.feature import VERL_ON_MEGATRON_CORE

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@add(
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec",
    feature=VERL_ON_MEGATRON_CORE,
    why="verl 0.4.0 builds every model from it; 0.8.0 without transformer_engine lacks RMSNorm and packed attention",
    upstream="not forwarded: specific to this pair of releases; megatron-core 0.10 has it, for transformer_engine",
    remove_when="the pinned megatron-core is 0.10 or later and has NPU layers",
    evidence="executed",
)
def decoder_block_spec(module: ModuleType) -> Callable[..., TransformerBlockSubmodules]:
    def get_gpt_decoder_block_spec(
        config: TransformerConfig, use_transformer_engine: bool = True
    ) -> TransformerBlockSubmodules:
        """The decoder layers of this pipeline stage; ``use_transformer_engine`` has no meaning on an NPU."""
        from post_training.models.megatron.packed_layer_specs import packed_block_spec

        return packed_block_spec(config)

    return get_gpt_decoder_block_spec


@add(
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec",
    feature=VERL_ON_MEGATRON_CORE,
    why="verl.models.mcore.model_initializer imports it; it is called for multi-token prediction only",
    upstream="not forwarded: specific to this pair of releases; megatron-core has it since 0.12",
    remove_when="the pinned megatron-core is 0.12 or later",
    evidence="executed",
)
def mtp_block_spec(module: ModuleType) -> Callable[..., NoReturn]:
    def get_gpt_mtp_block_spec(*args: Any, **kwargs: Any) -> NoReturn:
        """Always raises ``ValueError``: there are no such layers."""
        raise ValueError("megatron-core 0.8.0 has no multi-token prediction layers")

    return get_gpt_mtp_block_spec
