"""DeepSeek-V3's routers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.router_precision.feature import ROUTER_PRECISION

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig
    from vllm_ascend.models.deepseek_v2 import CustomDeepseekV2MoE


@wrap(
    "vllm_ascend.models.deepseek_v2:CustomDeepseekV2MoE.__init__",
    feature=ROUTER_PRECISION,
    evidence="executed",
    relies_on=[
        "vllm_ascend.models.deepseek_v2:CustomDeepseekV2MoE.forward",
        "vllm.model_executor.layers.linear:ReplicatedLinear.forward",
    ],
    why="it keeps the router's bias in the model's type: in bfloat16 the published biases, near 5, send about 40 % of "
    "the tokens to other experts than in training",
    upstream="https://github.com/vllm-project/vllm/pull/23640",
    remove_when="the pinned vLLM-Ascend keeps e_score_correction_bias in float32 and adds it to float32 scores",
)
def __init__(
    upstream: Callable[..., None],
    self: CustomDeepseekV2MoE,
    config: PretrainedConfig,
    quant_config: QuantizationConfig | None = None,
    prefix: str = "",
) -> None:
    from verl_patches.features.router_precision.gate import use_float32

    upstream(self, config=config, quant_config=quant_config, prefix=prefix)
    use_float32(self.gate)
