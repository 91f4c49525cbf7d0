"""A vLLM router gate in float32.

DeepSeek-V3 publishes its routers' `e_score_correction_bias` in float32 with values near 5, where neighbouring bfloat16
numbers are 0.016 to 0.031 apart, and the scores that it corrects are below 1. Rounded to bfloat16 it sends about 40 %
of the tokens to another set of experts. DeepSeek-V3.1's model card asks that it be "loaded and computed in FP32".
CANN's `aclnnMoeGatingTopK` takes scores and bias of one type, so the scores have to be float32 as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@cache
def _float32_method() -> Any:
    """Return vLLM's unquantised linear method, with scores in float32."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Float32GateMethod(UnquantizedLinearMethod):
        """Computes a gate's scores in float32 from inputs and weights of any type; the stored weights stay."""

        def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            """Return float32 scores [tokens, experts] for `x` [tokens, hidden]."""
            # A bfloat16 weight is cast in every forward: stored in float32 it would take twice the memory and the
            # traffic of each weight update, 212 MB a die for DeepSeek-V3.
            return functional.linear(x.float(), layer.weight.float(), bias)

    return Float32GateMethod()


def use_float32(gate: nn.Module) -> None:
    """Make a vLLM gate (`ReplicatedLinear`) score in float32 and hold its correction bias, if it has one, in float32.

    Call it before weights are loaded. The bias keeps its `Parameter` object, which the layer of experts shares.
    """
    gate.quant_method = _float32_method()
    bias = getattr(gate, "e_score_correction_bias", None)
    if bias is not None:
        bias.data = bias.data.float()
