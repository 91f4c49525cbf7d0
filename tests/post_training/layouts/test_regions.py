"""Layouts that are sent as numbers come back as regions, and equal ones are one object."""

import pickle

import pytest

from post_training.layouts.layout import PADDING, RolloutPlacement, Shard, TrainPlacement
from post_training.layouts.regions import layouts_of, regions_of, rollout_layouts
from post_training.plan.placement_text import parse_model

TABLE = parse_model("qwen3-235b-a22b")
NAMES = tuple(TABLE.shapes)
TRAIN = TrainPlacement(tp=2, pp=2, ep=2, dp=2, num_layer_list=(47, 47), vocab_padded=152064)


def test_regions_and_padding_of_all_ranks_come_back():
    layouts = [TABLE.megatron(TRAIN, rank) for rank in range(TRAIN.world_size)]
    sent = [pickle.loads(pickle.dumps(regions_of(layout, NAMES))) for layout in layouts]
    found = layouts_of(sent, NAMES)
    for before, after in zip(layouts, found, strict=True):
        assert [(shard.hf_name, shard.bounds) for shard in after] == [(each.hf_name, each.bounds) for each in before]
    assert any(shard.hf_name == PADDING for layout in layouts for shard in layout)
    distinct = {(shard.hf_name, shard.bounds) for layout in layouts for shard in layout}
    assert len({id(shard) for layout in found for shard in layout}) == len(distinct)


@pytest.mark.parametrize("instances", [1, 3])
def test_instances_have_the_layouts_of_the_model(instances):
    placement = RolloutPlacement(tp=2, dp=2, ep=4, instances=instances)
    found = rollout_layouts(TABLE, placement)
    assert found == [TABLE.vllm_ascend(placement, rank) for rank in range(placement.world_size)]
    assert found[-1] is found[3]


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (Shard("lm_head.bias", ((0, 4),), "w"), "lm_head.bias is no tensor of this model"),
        (Shard(NAMES[0], ((0, 4), (0, 4), (0, 4)), "w"), "has 3 dimensions, and only vectors and matrices are moved"),
    ],
)
def test_what_no_plan_describes_rejected(shard, said):
    with pytest.raises(ValueError, match=said):
        regions_of([shard], NAMES)
