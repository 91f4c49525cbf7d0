"""Megatron-core's router lacks a name where TransformerEngine is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_plugin.features.megatron_core.feature import MEGATRON_CORE

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@wrap(
    "megatron.core.transformer.moe.moe_utils:router_gating_linear",
    feature=MEGATRON_CORE,
    why="its autograd function checks whether `te_general_gemm` is None, but without TransformerEngine the module has "
    "no such name: a NameError for every router. `Router.gating` calls it directly, and MoELayer builds its "
    "router without a spec",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/3763",
    remove_when="the pinned Megatron-core has #3763 (main since 2026-03-19, in neither core_r0.16.0 nor 0.16.1)",
    relies_on=("megatron.core.transformer.moe.moe_utils:RouterGatingLinearFunction",),
    evidence="executed",
)
def router_gating_linear(
    upstream: Callable[..., Tensor],
    inp: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    router_dtype: torch.dtype,
) -> Tensor:
    from megatron.core.transformer.moe import moe_utils
    from torch.nn import functional

    if moe_utils.HAVE_TE:
        return upstream(inp, weight, bias, router_dtype)
    # The product of upstream's other branch; autograd returns gradients in the types of the inputs, as that does.
    bias = None if bias is None else bias.to(router_dtype)
    return functional.linear(inp.to(router_dtype), weight.to(router_dtype), bias)
