"""Layouts sent as numbers are restored as regions, and equal ones become one object."""

import pickle

import pytest

from post_training.layouts.layout import PADDING, RolloutPlacement, Shard, TrainPlacement
from post_training.layouts.regions import SideRegions, layouts_of, regions_of, rollout_regions
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
def test_instances_have_the_regions_of_the_model(instances):
    placement = RolloutPlacement(tp=2, dp=2, ep=4, instances=instances)
    found = rollout_regions(TABLE, placement)
    for rank, regions in enumerate(found):
        assert (regions.rows == regions_of(TABLE.vllm_ascend(placement, rank), NAMES).rows).all()
    assert len(found) == placement.world_size and found[-1] is found[3]


def test_tensors_first_held_are_those_of_no_lower_rank():
    layouts = [TABLE.megatron(TRAIN, rank) for rank in range(TRAIN.world_size)]
    side = SideRegions(NAMES, [regions_of(layout, NAMES) for layout in layouts], [])
    seen: set[str] = {PADDING}
    for rank, layout in enumerate(layouts):
        held = {shard.hf_name for shard in layout}
        assert side.first_held(rank) == held - seen
        seen |= held
    assert seen == {PADDING, *NAMES}


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (Shard("lm_head.bias", ((0, 4),), "w"), "lm_head.bias is not a tensor of this model"),
        (
            Shard(NAMES[0], ((0, 4), (0, 4), (0, 4)), "w"),
            "has 3 dimensions, but only vectors and matrices can be moved",
        ),
    ],
)
def test_unplannable_shard_rejected(shard, said):
    with pytest.raises(ValueError, match=said):
        regions_of([shard], NAMES)
