"""Statistics of a reshard match a naive count of the elements that every rank has and needs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from post_training.layouts.layout import EXPERT_MARK, PADDING, RolloutPlacement, Shard, TrainPlacement
from post_training.models.deepseek_v3 import table
from post_training.reshard.schedule import ALIGNMENT
from post_training.reshard.statistics import PerTensorStatistics, Spread, per_tensor_statistics, plan_statistics
from tests.post_training.layouts.drawn_placements import draw_train_placement, rollout_placements
from tests.post_training.layouts.reference import SMALL

TABLE, WIDE, ITEMSIZE = table(SMALL), 1 << 30, 4
PAIRS = {
    "stages": (
        TrainPlacement(tp=2, pp=2, ep=1, dp=1, num_layer_list=(2, 1), moe_tp_extend_ep=True),
        RolloutPlacement(tp=2, dp=2, ep=4, instances=1),
    ),
    "instances": (
        TrainPlacement(tp=2, pp=1, ep=3, dp=3, num_layer_list=(3,), moe_tp_extend_ep=True),
        RolloutPlacement(tp=1, dp=3, ep=3, instances=2),
    ),
}


def elements(shards: list[Shard]) -> dict[str, np.ndarray]:
    """Count how often a rank has each element of each tensor."""
    found: dict[str, np.ndarray] = {}
    for shard in shards:
        if shard.hf_name != PADDING:
            counts = found.setdefault(shard.hf_name, np.zeros(TABLE.shapes[shard.hf_name], dtype=int))
            counts[tuple(slice(*edge) for edge in shard.bounds)] += 1
    return found


def missing(train: TrainPlacement, rollout: RolloutPlacement) -> np.ndarray:
    """Return bytes [ranks, 2] of dense and of expert weights that each rank needs but does not have."""
    lacks = np.zeros((train.world_size, 2), dtype=int)
    for rank in range(train.world_size):
        held = elements(TABLE.megatron(train, rank))
        for name, counts in elements(TABLE.vllm_ascend(rollout, rank)).items():
            absent = counts[held[name] == 0] if name in held else counts
            lacks[rank, int(EXPERT_MARK in name)] += int(absent.sum()) * ITEMSIZE
    return lacks


def spread(values: np.ndarray) -> Spread:
    return Spread(values.min(), values.mean(), values.max())


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_received_regions_equal_the_missing_ones(pair, relay):
    statistics, plan = plan_statistics(TABLE, *pair, WIDE, ITEMSIZE, ranks_per_node=2, relay=relay)
    lacks = missing(*pair)
    assert lacks.min(axis=0).sum() < lacks.max(axis=0).sum() and lacks[:, 1].any()
    assert statistics.ranks == pair[0].world_size and statistics.bucket_bytes == WIDE
    assert statistics.received == statistics.bound_received == spread(lacks.sum(axis=1))
    assert statistics.expert_received == statistics.bound_expert_received == spread(lacks[:, 1])
    assert statistics.sent.average == statistics.received.average and statistics.received_over_bound == 1
    assert statistics.sent_maximum_over_average == statistics.sent.maximum / statistics.sent.average >= 1
    legs = [leg for leg in (plan.remote, plan.relay) if len(leg.target)]
    assert statistics.buckets == len(legs) and statistics.collectives == statistics.buckets + 1
    assert statistics.object_collectives == 0 and statistics.plan_seconds > 0
    regions = [sum(int((leg.target == rank).sum()) for leg in legs) for rank in range(statistics.ranks)]
    assert statistics.regions == spread(np.array(regions))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_bytes_go_into_a_node_from_other_nodes(pair):
    def into_nodes(ranks_per_node: int, relay: bool = False) -> Spread:
        statistics, _ = plan_statistics(TABLE, *pair, WIDE, ITEMSIZE, ranks_per_node=ranks_per_node, relay=relay)
        return statistics.node_ingress

    lacks = missing(*pair).sum(axis=1)
    assert into_nodes(1) == spread(lacks) and into_nodes(pair[0].world_size) == Spread(0, 0, 0)
    relayed, direct = into_nodes(2, relay=True), into_nodes(2)
    assert 0 < relayed.average <= direct.average < 2 * lacks.mean()
    assert relayed.minimum <= relayed.average <= relayed.maximum


def test_staging_holds_what_the_busiest_rank_sends_and_receives():
    whole, plan = plan_statistics(TABLE, *PAIRS["stages"], WIDE, ITEMSIZE)
    traffic = plan.remote.between(plan.world_size)
    most = int((traffic.sum(0) + traffic.sum(1)).max())
    pairs = int((traffic > 0).sum())
    assert most <= whole.staging_peak <= most + (len(plan.names) + 2 * pairs) * ALIGNMENT
    cut, _ = plan_statistics(TABLE, *PAIRS["stages"], most // 4, ITEMSIZE)
    assert 1 < cut.buckets == cut.collectives - 1 and 0 < cut.staging_peak <= 2 * cut.bucket_bytes
    assert cut.received == whole.received


def test_rank_that_stages_most_may_receive_little():
    """A rank that trains many layers sends them, so its received bytes do not bound its staging."""
    train = draw_train_placement(random.Random(0), 4, SMALL.layers, (None,), [2])
    found = []
    for rollout in rollout_placements(4):
        statistics, plan = plan_statistics(TABLE, train, rollout, WIDE, ITEMSIZE)
        traffic = plan.remote.between(4)
        both = traffic.sum(0) + traffic.sum(1)
        assert both.max() <= statistics.staging_peak <= both.max() + 8 * ALIGNMENT
        found.append(both[traffic.sum(0).argmax()] < 0.8 * both.max())
    assert any(found)


def test_nothing_moves_when_each_rank_owns_its_shards():
    train = TrainPlacement(tp=1, pp=1, ep=1, dp=1, num_layer_list=(3,), moe_tp_extend_ep=True)
    rollout = RolloutPlacement(tp=1, dp=1, ep=1, instances=1)
    statistics, _ = plan_statistics(TABLE, train, rollout, WIDE, ITEMSIZE)
    assert statistics.received == statistics.bound_received == statistics.node_ingress == Spread(0, 0, 0)
    assert (statistics.staging_peak, statistics.received_over_bound, statistics.sent_maximum_over_average) == (0, 0, 0)
    alone = per_tensor_statistics(TABLE, train, rollout, ITEMSIZE)
    largest = max(int(np.prod(dims)) for name, dims in TABLE.shapes.items() if EXPERT_MARK not in name) * ITEMSIZE
    assert alone.received == alone.expert_received == Spread(0, 0, 0) and alone.staging_peak == largest


def published(train: TrainPlacement, rollout: RolloutPlacement) -> tuple[np.ndarray, np.ndarray]:
    """Count the bytes that each rank receives in the published way, in total and for experts only.

    A rank receives all dense weights that it lacks. Of the experts it first receives those of its column from its
    pipeline peers, and then, from its column group, those of other columns that it serves.
    """
    everything, experts = np.zeros(train.world_size, dtype=int), np.zeros(train.world_size, dtype=int)
    for rank in range(train.world_size):
        held, needed = elements(TABLE.megatron(train, rank)), elements(TABLE.vllm_ascend(rollout, rank))
        column = train.tp_ep_rank(rank)
        mine = [elements(TABLE.megatron(train, other)) for other in range(train.world_size)
                if train.tp_ep_rank(other) == column]  # fmt: skip
        of_column = {name for each in mine for name in each if EXPERT_MARK in name}
        for name, dims in TABLE.shapes.items():
            size = int(np.prod(dims)) * ITEMSIZE
            if EXPERT_MARK in name:
                broadcast, exchanged = name in of_column and name not in held, name in needed and name not in of_column
                experts[rank] += size * (broadcast + exchanged)
            else:
                everything[rank] += size - int((held[name] > 0).sum() if name in held else 0) * ITEMSIZE
    return everything + experts, experts


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_published_way_gathers_dense_weights_and_broadcasts_experts_as_they_are_stored(pair):
    received, experts = published(*pair)
    statistics = per_tensor_statistics(TABLE, *pair, ITEMSIZE)
    assert isinstance(statistics, PerTensorStatistics) and statistics.received == spread(received)
    assert statistics.expert_received == spread(experts)
    dense = [int(np.prod(dims)) * ITEMSIZE for name, dims in TABLE.shapes.items() if EXPERT_MARK not in name]
    assert statistics.staging_peak == int(max(dense) * (2 + 1 / pair[0].tp))


def test_the_published_way_exists_for_experts_cut_over_all_ranks_alone():
    train = TrainPlacement(tp=2, pp=2, ep=1, dp=1, num_layer_list=(2, 1), moe_tp_extend_ep=False)
    with pytest.raises(ValueError, match="moe_tp_extend_ep"):
        per_tensor_statistics(TABLE, train, PAIRS["stages"][1])
