"""MoE communication method: fused dispatch for decode steps in graphs, vLLM-Ascend's own choice everywhere else."""

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.demonstrations import installed
from tests.demonstrations.vllm_patches import module_with
from verl_patches.features import settings
from verl_patches.features.rollout_parallel.feature import RolloutSettings
from vllm_ascend_patches.ascend_forward_context import get_fused_moe_state

Exchange = Enum("Exchange", ["AllGather", "All2All", "MC2", "MC2_PREFILL", "All2AllSeq"])


def chosen(upstreams: Exchange, with_prefill: bool = False, in_graph: bool = True, spread: int = 8) -> Exchange:
    """Return the patch's choice, given upstream's."""
    ours = replace(settings.current(), rollout=RolloutSettings(expert_parallel_size=spread))
    config = SimpleNamespace(torchair_graph_config=SimpleNamespace(enabled=in_graph))
    with (
        mock.patch.object(settings, "current", return_value=ours),
        module_with("vllm_ascend.ascend_config", get_ascend_config=lambda: config),
    ):
        return installed(get_fused_moe_state, lambda ep_size, prefill: upstreams)(spread, with_prefill)


def test_a_decode_in_a_graph_goes_through_the_fused_exchange():
    assert chosen(Exchange.All2All) is Exchange.MC2


@pytest.mark.parametrize("case", [{"with_prefill": True}, {"in_graph": False}, {"spread": 1}])
def test_everything_else_is_left_to_upstream(case):
    assert chosen(Exchange.All2All, **case) is Exchange.All2All


@pytest.mark.parametrize("upstreams", [each for each in Exchange if each is not Exchange.All2All])
def test_other_choices_of_upstream_stay(upstreams):
    assert chosen(upstreams) is upstreams
