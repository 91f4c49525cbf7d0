"""How the rollout's placement is read from engines of vLLM-Ascend at the cluster's commit and of the release."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest

from post_training.layouts.placements import PlacementError, rollout_placement, train_placement
from tests.demonstrations.vllm_patches import module_with

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


@contextmanager
def rank_of_megatron(rank: int, tensor: int, stage: int, replica: int, expert: int):
    """This process as a rank of Megatron with TP2, PP2, EP2 and DP2 over 8 dies."""
    values = {
        "get_tensor_model_parallel_world_size": 2,
        "get_pipeline_model_parallel_world_size": 2,
        "get_virtual_pipeline_model_parallel_world_size": None,
        "get_expert_model_parallel_world_size": 2,
        "get_data_parallel_world_size": 2,
        "get_tensor_model_parallel_rank": tensor,
        "get_pipeline_model_parallel_rank": stage,
        "get_data_parallel_rank": replica,
        "get_expert_model_parallel_rank": expert,
    }
    state = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
    with (
        mock.patch("torch.distributed.get_rank", lambda: rank),
        module_with("megatron.core", parallel_state=state),
        module_with("verl.utils.megatron_utils", get_transformer_layer_offset=lambda stage, chunk, config: 2 * stage),
    ):
        yield


def test_another_order_of_megatrons_ranks_is_refused():
    """Rank 6 in the order tp-cp-ep-dp-pp is tensor rank 0 of the second replica in stage 1."""
    config = SimpleNamespace(num_layers=3)
    with rank_of_megatron(6, tensor=0, stage=1, replica=1, expert=1):
        placement = train_placement(config)
    assert (placement.tp, placement.pp, placement.ep, placement.dp) == (2, 2, 2, 2)
    assert placement.num_layer_list == (2, 1)
    right = {"tensor": 0, "stage": 1, "replica": 1, "expert": 1}
    for name, value in (("tensor", 1), ("stage", 0), ("replica", 0), ("expert", 0)):
        with (
            rank_of_megatron(6, **(right | {name: value})),
            pytest.raises(PlacementError, match="rank 6 is .*needs that"),
        ):
            train_placement(config)
