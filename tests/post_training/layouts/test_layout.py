"""The sharding specs match a naive reference that slices full tensors, in many layouts."""

import pytest
import torch
from hypothesis import given, settings

from post_training.layouts.layout import PADDING, LocalView, RolloutPlacement, Shard, TrainPlacement
from post_training.models.deepseek_v3 import DeepseekV3Shape, hf_shapes, megatron, vllm_ascend
from tests.post_training.layouts.placements import layout_pairs
from tests.post_training.layouts.reference import SMALL, State, full_weights, megatron_state, rollout_state

FULL = full_weights(SMALL)


def assert_table_describes(shards: list[Shard], state: State, full: State = FULL) -> None:
    """Check that every shard has the values of its slice, and that shards cover every local element exactly once."""
    seen = {name: torch.zeros_like(value) for name, value in state.items()}
    for shard in shards:
        bounds = tuple(slice(*interval) for interval in shard.bounds)
        held = shard.locate(state)
        expected = torch.zeros(shard.extents) if shard.hf_name == PADDING else full[shard.hf_name][bounds]
        assert torch.equal(held, expected), shard
        shard.locate(seen).add_(1)
    assert all(bool((count == 1).all()) for count in seen.values()), [k for k, v in seen.items() if (v != 1).any()]


@settings(max_examples=60)
@given(layout_pairs())
def test_tables_equal_the_naive_reference(pair: tuple[TrainPlacement, RolloutPlacement]) -> None:
    train, rollout = pair
    for rank in range(train.world_size):
        assert_table_describes(megatron(SMALL, train, rank), megatron_state(FULL, SMALL, train, rank))
        assert_table_describes(vllm_ascend(SMALL, rollout, rank), rollout_state(FULL, SMALL, rollout, rank))


@settings(max_examples=60)
@given(layout_pairs())
def test_ranks_together_hold_every_element(pair: tuple[TrainPlacement, RolloutPlacement]) -> None:
    for shards_of, placement in zip((megatron, vllm_ascend), pair, strict=True):
        counts = {name: torch.zeros(dims) for name, dims in hf_shapes(SMALL).items()}
        for rank in range(placement.world_size):
            for shard in shards_of(SMALL, placement, rank):
                if shard.hf_name != PADDING:
                    counts[shard.hf_name][tuple(slice(*interval) for interval in shard.bounds)] += 1
        assert all(bool((count > 0).all()) for count in counts.values())


def test_wrong_shard_detected() -> None:
    placement = TrainPlacement(tp=2, pp=1, ep=1, dp=1, num_layer_list=(3,))
    state = megatron_state(FULL, SMALL, placement, 1)
    with pytest.raises(AssertionError):
        assert_table_describes(megatron(SMALL, placement, 0), state)


def test_megatron_rank_order() -> None:
    """core_r0.8.0 orders ranks by tensor, then data (expert ranks first), then pipeline parallelism."""
    placement = TrainPlacement(tp=2, pp=2, ep=2, dp=4, num_layer_list=(2, 1))
    ranks = range(placement.world_size)
    assert [placement.tp_rank(rank) for rank in ranks] == [0, 1] * 8
    assert [placement.pp_rank(rank) for rank in ranks] == [0] * 8 + [1] * 8
    assert [placement.tp_ep_rank(rank) for rank in ranks] == [0, 1, 2, 3] * 4


def test_the_last_rank_of_a_rollout_takes_the_experts_that_are_left_over() -> None:
    placement = RolloutPlacement(tp=1, dp=3, ep=3)
    assert [placement.experts(rank, 8) for rank in range(3)] == [(0, 2), (2, 4), (4, 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tp=2, pp=2, ep=1, dp=1, num_layer_list=(3,)), "num_layer_list"),
        (dict(tp=2, pp=1, ep=2, dp=3, num_layer_list=(3,)), "must divide"),
        (dict(tp=0, pp=1, ep=1, dp=1, num_layer_list=(3,)), "positive"),
    ],
)
def test_impossible_training_placements_rejected(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainPlacement(**arguments)


def test_impossible_tables_rejected() -> None:
    with pytest.raises(ValueError, match="tp \\* dp"):
        RolloutPlacement(tp=2, dp=2, ep=2)
    with pytest.raises(ValueError, match="does not add up"):
        megatron(SMALL, TrainPlacement(tp=1, pp=1, ep=1, dp=1, num_layer_list=(4,)), 0)
    with pytest.raises(ValueError, match="cannot be divided"):
        megatron(SMALL, TrainPlacement(tp=5, pp=1, ep=1, dp=1, num_layer_list=(3,)), 0)


def test_a_config_without_low_rank_queries_rejected() -> None:
    with pytest.raises(ValueError, match="q_lora_rank"):
        DeepseekV3Shape.from_config({"q_lora_rank": None})


def test_locate_names_the_tensor_that_does_not_fit() -> None:
    shard = Shard("weight", ((0, 2), (0, 3)), "local", LocalView(shape=(3, 2), transposed=True))
    assert shard.locate({"local": torch.arange(6.0)}).tolist() == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(KeyError, match="local"):
        shard.locate({})
    with pytest.raises(ValueError, match="local.*does not fit"):
        shard.locate({"local": torch.zeros(5)})
    with pytest.raises(ValueError, match="places weight"):
        Shard("weight", ((0, 2), (0, 3)), "local").locate({"local": torch.zeros(3, 3)})
