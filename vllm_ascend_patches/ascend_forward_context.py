"""vLLM-Ascend uses the fused exchange of tokens between the dies with experts in graphs on any number of dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL, require_fused_exchange

if TYPE_CHECKING:
    from vllm_ascend.ascend_forward_context import FusedMoEState


@wrap(
    "vllm_ascend.ascend_forward_context:get_fused_moe_state",
    feature=ROLLOUT_EXPERT_PARALLEL,
    evidence="executed",
    why="below 16 dies it decodes through an all-to-all that reads its sizes on the host, which no graph supports",
    upstream="https://github.com/vllm-project/vllm-ascend/pull/2734",
    remove_when="the pinned vLLM-Ascend chooses the fused exchange for graphs on any number of dies",
    relies_on=["vllm_ascend.ascend_config:get_ascend_config"],
)
def get_fused_moe_state(upstream: Callable[..., FusedMoEState], ep_size: int, with_prefill: bool) -> FusedMoEState:
    chosen = upstream(ep_size, with_prefill)
    if with_prefill:
        return chosen
    from vllm_ascend.ascend_config import get_ascend_config

    from post_training.chips import family_of_this_machine

    in_graph = get_ascend_config().torchair_graph_config.enabled
    states = type(chosen)
    if in_graph and chosen is states.All2All:
        chosen = states.MC2
    if chosen is states.MC2:
        require_fused_exchange(family_of_this_machine(), ep_size, in_graph)
    return chosen
