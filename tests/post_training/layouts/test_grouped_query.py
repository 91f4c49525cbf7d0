"""Sharding specs of grouped-query attention match a naive reference in many layouts: tied, head norms, experts."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from post_training.layouts.grouped_query import GroupedQueryShape, table
from post_training.layouts.layout import RolloutPlacement, TrainPlacement
from post_training.models.families import table_for
from tests.post_training.layouts.grouped_query_reference import (
    SHAPES,
    SMALL,
    full_weights,
    megatron_state,
    rollout_state,
)
from tests.post_training.layouts.placements import layout_pairs
from tests.post_training.layouts.reference import same_bits
from tests.post_training.layouts.test_layout import assert_table_describes
from tests.post_training.reshard.in_process import reshard_in_process

Pair = tuple[TrainPlacement, RolloutPlacement]


def fits(pair: Pair) -> bool:
    """Return whether both models can divide their key heads over these ranks."""
    train, rollout = pair
    return SMALL.kv_heads % train.tp == 0 and (SMALL.kv_heads % rollout.tp == 0 or rollout.tp % SMALL.kv_heads == 0)


@settings(max_examples=60)
@given(layout_pairs(), st.sampled_from(SHAPES))
def test_the_table_equals_the_naive_reference(pair: Pair, shape: GroupedQueryShape) -> None:
    train, rollout = pair
    assume(fits(pair))
    full = full_weights(shape)
    for rank in range(train.world_size):
        assert_table_describes(table(shape).megatron(train, rank), megatron_state(full, shape, train, rank), full)
        state = rollout_state(full, shape, rollout, rank)
        assert_table_describes(table(shape).vllm_ascend(rollout, rank), state, full)


@settings(max_examples=40)
@given(layout_pairs(worlds=(1, 2, 3, 6, 12)), st.sampled_from(SHAPES), st.sampled_from([3000, 1 << 30]))
def test_random_layouts_are_exact(pair: Pair, shape: GroupedQueryShape, bucket_bytes: int) -> None:
    train, rollout = pair
    assume(fits(pair))
    full, ranks = full_weights(shape), range(train.world_size)
    expected = [rollout_state(full, shape, rollout, rank) for rank in ranks]
    targets = [{name: torch.full_like(value, torch.nan) for name, value in state.items()} for state in expected]
    reshard_in_process(
        [megatron_state(full, shape, train, rank) for rank in ranks],
        targets,
        [table(shape).megatron(train, rank) for rank in ranks],
        [table(shape).vllm_ascend(rollout, rank) for rank in ranks],
        bucket_bytes,
    )
    for rank in ranks:
        assert all(same_bits(targets[rank][name], value) for name, value in expected[rank].items())


def test_more_ranks_than_key_heads_share_them() -> None:
    shape = dataclasses.replace(SMALL, kv_heads=2)
    full = full_weights(shape)
    placement = RolloutPlacement(tp=4)
    for rank in range(4):
        state = rollout_state(full, shape, placement, rank)
        assert_table_describes(table(shape).vllm_ascend(placement, rank), state, full)
    with pytest.raises(ValueError, match="2 key heads cannot be shared by 3 ranks"):
        table(shape).vllm_ascend(RolloutPlacement(tp=3, vocab_multiple=12), 0)


def test_misfits_rejected() -> None:
    with pytest.raises(ValueError, match="query groups"):
        table(SMALL).megatron(TrainPlacement(tp=4, pp=1, ep=1, dp=1, num_layer_list=(3,)), 0)
    with pytest.raises(ValueError, match="does not add up to 3 layers"):
        table(SMALL).megatron(TrainPlacement(tp=1, pp=1, ep=1, dp=1, num_layer_list=(2,)), 0)


def test_a_model_is_found_by_its_architecture() -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 4,
        "vocab_size": 100,
    }
    assert GroupedQueryShape.from_config(config, bias=True) == SMALL
    assert table_for(config).shapes == table(SMALL).shapes
    assert table_for(config | {"tie_word_embeddings": True}).ignored_in_files == ("lm_head.weight",)
    with pytest.raises(ValueError, match="LlamaForCausalLM. Known are DeepseekV3ForCausalLM, Qwen2ForCausalLM"):
        table_for(config | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    "given, kv_heads, head_dim, tied",
    [
        ({}, 8, 16, False),
        ({"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": True}, 8, 16, True),
        ({"num_key_value_heads": 2, "head_dim": 48}, 2, 48, False),
    ],
)
def test_sizes_that_config_leaves_out_follow_from_the_others(given, kv_heads, head_dim, tied):
    """Llama and Qwen1.5 leave out the number of key heads, and all except Qwen3 the width of a head."""
    config = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
              "vocab_size": 96}  # fmt: skip
    shape = GroupedQueryShape(128, 256, 3, 8, kv_heads, head_dim, 96, tied)
    assert GroupedQueryShape.from_config(config | given) == shape
    assert GroupedQueryShape.from_config(config | given, bias=True) == dataclasses.replace(shape, bias=True)
