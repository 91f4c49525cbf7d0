"""vLLM-Ascend chooses the experts of a token by float32 scores or, for benchmarks, in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.router_balance.feature import ROUTER_BALANCE
from verl_patches.features.router_precision.feature import ROUTER_PRECISION

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.fused_moe.layer import MoEConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig
    from vllm_ascend.ops.fused_moe import AscendSparseMoeBlock, AscendUnquantizedFusedMoEMethod


@wrap(
    "vllm_ascend.ops.fused_moe:AscendUnquantizedFusedMoEMethod.__init__",
    feature=ROUTER_BALANCE,
    why="it balances experts by force only in its profile run, but a benchmark with random weights always needs it",
    upstream="https://github.com/vllm-project/vllm-ascend/pull/15121",
    remove_when="the pinned vLLM-Ascend has an option that balances experts by force outside its profile run",
    relies_on=["vllm_ascend.ops.fused_moe:AscendUnquantizedFusedMoEMethod.apply"],
)
def __init__(
    upstream: Callable[..., None], self: AscendUnquantizedFusedMoEMethod, moe: MoEConfig | None = None
) -> None:
    from post_training.models.router_balance import balanced

    upstream(self, moe=moe)
    # Set on the object, so that a graph captured from its call contains no code of the overlay's engine.
    self.apply = balanced(self.apply)


@wrap(
    "vllm_ascend.ops.fused_moe:AscendSparseMoeBlock.__init__",
    feature=ROUTER_PRECISION,
    relies_on=[
        "vllm_ascend.ops.fused_moe:AscendSparseMoeBlock.forward",
        "vllm.model_executor.layers.linear:ReplicatedLinear.forward",
    ],
    why="it rounds the router's scores to bfloat16, but training does not: among nearly tied experts the two choose "
    "different ones",
    upstream="not forwarded: vLLM rounds these scores as well; what they must agree with is this project's training",
    remove_when="the pinned vLLM-Ascend scores experts in float32",
)
def init_with_float32_scores(
    upstream: Callable[..., None],
    self: AscendSparseMoeBlock,
    config: PretrainedConfig,
    quant_config: QuantizationConfig | None = None,
    prefix: str = "",
) -> None:
    from verl_patches.features.router_precision.gate import use_float32

    upstream(self, config=config, quant_config=quant_config, prefix=prefix)
    use_float32(self.gate)
