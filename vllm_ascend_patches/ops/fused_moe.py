"""How vLLM-Ascend chooses the experts of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.router_balance.feature import ROUTER_BALANCE

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.layer import MoEConfig
    from vllm_ascend.ops.fused_moe import AscendUnquantizedFusedMoEMethod


@wrap(
    "vllm_ascend.ops.fused_moe:AscendUnquantizedFusedMoEMethod.__init__",
    feature=ROUTER_BALANCE,
    why="it balances experts by force in its profile run alone, and a benchmark with random weights needs it always",
    upstream="https://github.com/vllm-project/vllm-ascend/pull/15121",
    remove_when="the pinned vLLM-Ascend has an option that balances experts by force outside its profile run",
    relies_on=["vllm_ascend.ops.fused_moe:AscendUnquantizedFusedMoEMethod.apply"],
)
def __init__(
    upstream: Callable[..., None], self: AscendUnquantizedFusedMoEMethod, moe: MoEConfig | None = None
) -> None:
    from post_training.models.router_balance import balanced

    upstream(self, moe=moe)
    # On the object, so that the graph that is captured of its call meets no code of the overlay's engine.
    self.apply = balanced(self.apply)
