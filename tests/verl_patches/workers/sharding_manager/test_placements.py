"""How the rollout's placement is read from engines of vLLM-Ascend at the cluster's commit and of the release."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.demonstrations.vllm_patches import module_with
from verl_patches.workers.sharding_manager.placements import PlacementError, rollout_placement

GRAPH = SimpleNamespace(enabled=True, enable_multistream_moe=True)
ASCEND = SimpleNamespace(
    expert_map_path=None, dynamic_eplb=False, enable_prefill_optimizations=False, torchair_graph_config=GRAPH
)
AT_THE_PIN = {
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "enable_expert_parallel": True,
}


@contextmanager
def rank_of(world: int, rank: int, tensor_rank: int):
    """This process as a rank of vLLM."""
    groups = {
        "get_tp_group": lambda: SimpleNamespace(rank_in_group=tensor_rank),
        "get_ep_group": lambda: SimpleNamespace(rank_in_group=rank % 4),
    }
    state = SimpleNamespace(**groups)
    with (
        mock.patch.multiple("torch.distributed", get_rank=lambda: rank, get_world_size=lambda: world),
        module_with("vllm.distributed", parallel_state=state),
        module_with("vllm_ascend.ascend_config", get_ascend_config=lambda: ASCEND),
    ):
        yield


@pytest.mark.parametrize(("of_release", "expected"), [({}, 2), ({"lmhead_tp_size": -1}, 2), ({"lmhead_tp_size": 4}, 4)])
def test_the_output_layer_has_a_size_of_its_own_only_where_it_is_set(of_release, expected):
    config = SimpleNamespace(parallel_config=SimpleNamespace(**AT_THE_PIN, **of_release))
    with rank_of(world=8, rank=5, tensor_rank=1):
        placement = rollout_placement(config)
    assert (placement.tp, placement.dp, placement.ep, placement.instances) == (2, 2, 4, 2)
    assert placement.lm_head_size == expected and placement.shared_expert_replicated


def test_another_order_of_ranks_is_refused():
    config = SimpleNamespace(parallel_config=SimpleNamespace(**AT_THE_PIN))
    with rank_of(world=8, rank=5, tensor_rank=0), pytest.raises(PlacementError, match="rank 5 is"):
        rollout_placement(config)
