"""Megatron-core believes that TransformerEngine is there, wherever MLA is built."""

from __future__ import annotations

from overlay import wrap
from verl_plugin.features.megatron_core.feature import MEGATRON_CORE


@wrap(
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
    feature=MEGATRON_CORE,
    why="it is true wherever Megatron-core's extension for TransformerEngine imports, which also works without "
    "TransformerEngine; `TELinear` is then a mock object, and building MLA fails in an isinstance with it. "
    "`MultiLatentAttention.__init__` reads the name before any choice of a spec",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/3763",
    remove_when="the pinned Megatron-core has #3763 (main since 2026-03-19, in neither core_r0.16.0 nor 0.16.1)",
    relies_on=(
        "megatron.core.extensions.transformer_engine:HAVE_TE",
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__",
    ),
    evidence="executed",
)
def transformer_engine_is_there(upstream: bool) -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return upstream and HAVE_TE
