"""Planning and splitting into buckets, for random layouts and for all ranks of the real cluster in one process."""

import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reshard_planning import sharded
from post_training.layouts.layout import RolloutPlacement, Shard, TrainPlacement
from post_training.layouts.regions import regions_of
from post_training.models.deepseek_v3 import DeepseekV3Shape, megatron, table, vllm_ascend
from post_training.reshard.overlaps import LayoutError
from post_training.reshard.plan import ReshardPlan, Transfers, make_plan
from post_training.reshard.rank_plan import make_rank_plan
from post_training.reshard.schedule import ALIGNMENT, BucketError, bucket_count
from tests.post_training.layouts.placements import divisors, layout_pairs, rollout_placements
from tests.post_training.layouts.reference import SMALL, State, full_weights, megatron_state, rollout_state, same_bits
from tests.post_training.reshard.in_process import Outcome, reshard_in_process

FULL = full_weights(SMALL)
Pair = tuple[TrainPlacement, RolloutPlacement]


def layouts(pair: Pair, shape: DeepseekV3Shape = SMALL) -> tuple[list[list[Shard]], list[list[Shard]]]:
    train, rollout = pair
    ranks = range(train.world_size)
    return [megatron(shape, train, rank) for rank in ranks], [vllm_ascend(shape, rollout, rank) for rank in ranks]


def plan_of(pair: Pair) -> ReshardPlan:
    return make_plan(*layouts(pair), lambda name: 4)


def reshard(
    pair: Pair, full: State, shape: DeepseekV3Shape, bucket_bytes: int, node_of: list[int] | None = None
) -> Outcome:
    """Reshard in one process and compare every rank with the naive reference."""
    train, rollout = pair
    ranks = range(train.world_size)
    sources = [megatron_state(full, shape, train, rank) for rank in ranks]
    expected = [rollout_state(full, shape, rollout, rank) for rank in ranks]
    targets = [{name: torch.full_like(value, torch.nan) for name, value in state.items()} for state in expected]
    outcome = reshard_in_process(sources, targets, *layouts(pair, shape), bucket_bytes, node_of)
    for rank in ranks:
        for name, value in expected[rank].items():
            assert same_bits(targets[rank][name], value), (rank, name)
    return outcome


@settings(max_examples=80)
@given(layout_pairs(worlds=(1, 2, 3, 4, 6, 8, 12)), st.sampled_from([3000, 7000, 1 << 30]), st.sampled_from([2, 3, 99]))
def test_random_layouts_are_exact_and_bounded(pair: Pair, bucket_bytes: int, per_node: int) -> None:
    nodes = [rank // per_node for rank in range(pair[0].world_size)]
    outcome = reshard(pair, FULL, SMALL, bucket_bytes, nodes)
    sizes = [step.size for rank in outcome.buckets for r in rank for step in (r.send, r.receive)]
    assert max(sizes, default=0) <= bucket_bytes


@settings(max_examples=60)
@given(layout_pairs(worlds=(2, 3, 4, 6, 8, 12)), st.sampled_from([1, 2, 3, 99]))
def test_each_missing_element_is_sent_once(pair: Pair, per_node: int) -> None:
    """Compare with a naive count: a rank receives exactly the elements that it needs and does not have."""
    train, rollout = layouts(pair)
    plan = make_plan(train, rollout, lambda name: 4, [rank // per_node for rank in range(len(train))])
    received = (plan.remote.between(plan.world_size) + plan.relay.between(plan.world_size)).sum(0)
    for rank in range(plan.world_size):
        needed = 0
        held = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in FULL.items()}
        for shard in train[rank]:
            if shard.hf_name:
                held[shard.hf_name][tuple(slice(*edge) for edge in shard.bounds)] = True
        for shard in rollout[rank]:
            if shard.hf_name:
                needed += 4 * int((~held[shard.hf_name][tuple(slice(*edge) for edge in shard.bounds)]).sum())
        assert received[rank] == needed


def streams(transfers: Transfers) -> dict[tuple[int, int], list[list[int]]]:
    """Return the transfers of each pair of ranks, in order."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    columns = (transfers.name, transfers.source_shard, transfers.target_shard, transfers.bytes)
    rows = np.column_stack((*columns, transfers.bounds)).tolist()
    for source, target, row in zip(transfers.source.tolist(), transfers.target.tolist(), rows, strict=True):
        found.setdefault((source, target), []).append(row)
    return found


def bytes_of_rows(transfers: Transfers) -> list[int]:
    rows = transfers.bounds[:, 1] - transfers.bounds[:, 0]
    return (transfers.bytes // rows).tolist()


def itemsize(name: str) -> int:
    return 4 if "norm" in name else 2


def check_rank_plans(train: list[list[Shard]], rollout: list[list[Shard]]) -> None:
    """Compare the plans of all ranks with the global plan."""
    whole = make_plan(train, rollout, itemsize)
    traffic = whole.remote.between(whole.world_size) + whole.local.between(whole.world_size)
    widest = max(bytes_of_rows(whole.remote) + bytes_of_rows(whole.local))
    names = tuple(FULL)
    held, needed = ([regions_of(shards, names) for shards in layouts] for layouts in (train, rollout))
    plans = [make_rank_plan(held, needed, names, itemsize, rank) for rank in range(whole.world_size)]
    for rank, own in enumerate(plans):
        assert (own.traffic == traffic).all() and own.widest_row == widest
        for part, leg in ((own.remote, whole.remote), (own.local, whole.local)):
            assert streams(part) == {ends: stream for ends, stream in streams(leg).items() if rank in ends}
    assert len({own.digest for own in plans}) == 1


@settings(max_examples=80)
@given(layout_pairs(worlds=(1, 2, 3, 4, 6, 8, 12)))
def test_plan_of_a_rank_is_its_part_of_the_whole_plan(pair: Pair) -> None:
    check_rank_plans(*layouts(pair))


@st.composite
def fsdp2_pairs(draw: st.DrawFn) -> tuple[list[list[Shard]], list[list[Shard]]]:
    """Draw layouts with rows sharded over some of the ranks and replicated on the others, and names in any order."""
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
    parts = draw(st.sampled_from(divisors(world)))
    held = [list(sharded(table(SMALL), parts, rank % parts)) for rank in range(world)]
    rollout = draw(rollout_placements(world))
    return [draw(st.permutations(held[0])), *held[1:]], [vllm_ascend(SMALL, rollout, rank) for rank in range(world)]


@settings(max_examples=80)
@given(fsdp2_pairs())
def test_plan_of_a_rank_with_fsdp2_is_its_part_of_the_whole_plan(
    pair: tuple[list[list[Shard]], list[list[Shard]]],
) -> None:
    check_rank_plans(*pair)


def test_regions_held_or_needed_twice_by_a_rank_are_planned_as_such() -> None:
    """With tied embeddings over several chunks of a stage, the rank takes both turns and fills both copies."""
    name = next(iter(FULL))
    shard, other = Shard(name, ((0, 4), (0, 2)), "embedding"), Shard(name, ((0, 4), (0, 2)), "output")
    rest = Shard(name, ((4, 8), (0, 2)), "embedding")
    check_rank_plans(
        [[shard, other, rest], [shard, rest], [], []], [[shard], [other, shard], [shard, other, rest], [rest]]
    )


def test_digest_of_a_rank_tells_layouts_apart() -> None:
    name = next(iter(FULL))
    upper, lower = (Shard(name, (rows, (0, 2)), "w") for rows in ((0, 4), (4, 8)))
    both = [regions_of(shards, [name]) for shards in ([upper], [lower])]
    digests = {
        make_rank_plan(train, rollout, [name], {name: size}.__getitem__, 0).digest
        for train in (both, both[::-1])
        for rollout in (both, both[::-1])
        for size in (2, 4)
    }
    assert len(digests) == 8


def test_plans_are_equal_on_every_rank() -> None:
    """Ranks are processes, and sets and hashes have a different order in each."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.post_training.reshard.plan_digests"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (json.loads(process.communicate()[0]) for process in processes)
    assert one["hash"] != other["hash"]
    assert one["digests"] == other["digests"] and len(set(one["digests"])) > 12


def test_different_placements_have_different_digests() -> None:
    train = TrainPlacement(tp=2, pp=1, ep=1, dp=2, num_layer_list=(3,))
    digests = {plan_of((train, RolloutPlacement(tp=tp, dp=4 // tp, ep=4))).digest for tp in (1, 2, 4)}
    assert len(digests) == 3


def test_owners_take_turns() -> None:
    """If three replicas can send, they share it equally instead of leaving it to the first."""
    pair = (TrainPlacement(tp=1, pp=2, ep=1, dp=3, num_layer_list=(2, 1)), RolloutPlacement(tp=1, dp=6, ep=1))
    sent = plan_of(pair).remote.between(6).sum(1)
    for stage in (sent[:3], sent[3:]):
        assert stage.max() <= 1.1 * stage.min()


def test_a_region_enters_a_node_once() -> None:
    """Two nodes have four ranks each; the stages are on different nodes, and every rank needs both completely."""
    train = TrainPlacement(tp=1, pp=2, ep=1, dp=4, num_layer_list=(2, 1))
    train_layouts, rollout_layouts = layouts((train, RolloutPlacement(tp=1, dp=8, ep=1, instances=1)))
    nodes = np.array([0] * 4 + [1] * 4)
    plan = make_plan(train_layouts, rollout_layouts, lambda name: 4, nodes)
    entering = plan.remote.select(nodes[plan.remote.source] != nodes[plan.remote.target])
    assert (nodes[plan.relay.source] == nodes[plan.relay.target]).all()
    entries = Counter(
        (int(name), *bounds) for name, bounds in zip(entering.name, entering.bounds.tolist(), strict=True)
    )
    assert set(entries.values()) == {1}
    for relayed in plan.relay.between(8).sum(1).reshape(2, 4):
        assert relayed.max() <= 1.1 * relayed.min()
    # The four owners of a stage take turns sending to the other node; regions differ in size.
    for sent in entering.between(8).sum(1).reshape(2, 4):
        assert sent.min() > 0 and sent.max() <= 2 * sent.min()
    flat = plan_of((train, RolloutPlacement(tp=1, dp=8, ep=1)))
    assert len(flat.relay) == 0
    assert flat.remote.bytes.sum() == plan.remote.bytes.sum() + plan.relay.bytes.sum()


def test_an_incomplete_source_rejected() -> None:
    train, rollout = layouts((TrainPlacement(1, 1, 1, 1, (3,)), RolloutPlacement(1)))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    without = [[shard for shard in train[0] if shard.hf_name != name]]
    with pytest.raises(LayoutError, match=name):
        make_plan(without, rollout, lambda name: 4)
    later = "model.layers.1.mlp.experts.3.down_proj.weight"
    both = [[shard for shard in without[0] if shard.hf_name != later]]
    with pytest.raises(LayoutError, match=f"^{name}: no training rank owns all of the region"):
        make_plan(both, rollout, lambda name: 4)


@pytest.mark.parametrize(
    "held",
    [
        [((0, 3), (0, 2)), ((2, 4), (0, 2))],  # rows
        [((0, 4), (0, 2)), ((0, 4), (1, 2))],  # columns
        [((0, 4), (0, 1)), ((0, 2), (1, 2)), ((1, 4), (1, 2))],  # both; no neighbours in sort order overlap here
        [((0, 4), (0, 1)), ((0, 1), (1, 2)), ((2, 3), (0, 2))],
    ],
)
def test_overlapping_sources_rejected(held: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    train = [[Shard("weight", bounds, "a")] for bounds in held]
    need = [[Shard("weight", ((0, 4), (0, 2)), "b")], *([] for _ in held[1:])]
    with pytest.raises(LayoutError, match="weight.*overlapping"):
        make_plan(train, need, lambda name: 4)


def test_sources_cut_in_rows_and_columns_are_joined() -> None:
    tiles = [((0, 2), (0, 1)), ((0, 2), (1, 2)), ((2, 4), (0, 1)), ((2, 4), (1, 2))]
    need = [[Shard("weight", ((0, 4), (0, 2)), "b")], [], [], []]
    plan = make_plan([[Shard("weight", bounds, "a")] for bounds in tiles], need, lambda name: 4)
    assert plan.remote.between(4)[:, 0].tolist() == [0, 8, 8, 8]


def test_world_sizes_must_agree() -> None:
    with pytest.raises(LayoutError, match="2 training ranks"):
        make_plan([[], []], [[]], lambda name: 4)


def test_bucket_smaller_than_a_row_rejected() -> None:
    pair = (TrainPlacement(2, 1, 1, 1, (3,)), RolloutPlacement(tp=1, dp=2, ep=2))
    remote = plan_of(pair).remote
    with pytest.raises(BucketError, match="a bucket of 10 bytes cannot hold a row of up to ") as told:
        bucket_count(remote, 2, 10)
    assert bucket_count(remote, 2, told.value.least) > 1
    with pytest.raises(BucketError):
        bucket_count(remote, 2, told.value.least - 1)


def test_a_limit_that_fits_everything_is_one_bucket() -> None:
    """A single bucket needs no extra space for splits, for which this limit would be too small."""
    transfers = plan_of((TrainPlacement(2, 1, 1, 1, (3,)), RolloutPlacement(tp=1, dp=2, ep=2))).remote
    traffic = transfers.between(2)
    enough = int(max(traffic.sum(0).max(), traffic.sum(1).max())) + ALIGNMENT
    assert bucket_count(transfers, 2, enough) == 1 and bucket_count(transfers, 2, enough - 1) == 2


CLUSTER = DeepseekV3Shape(
    hidden=16,
    intermediate=32,
    moe_intermediate=4,
    layers=61,
    dense_layers=3,
    heads=8,
    experts=256,
    shared_experts=1,
    q_lora=8,
    kv_lora=6,
    qk_nope=2,
    qk_rope=2,
    v_head=2,
    vocab=256,
)
"""DeepSeek-V3-671B with every width scaled down; the numbers of layers and experts are the real ones."""
CLUSTER_TRAIN = TrainPlacement(tp=4, pp=8, ep=8, dp=8, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "per_node"),
    [
        (RolloutPlacement(tp=2, dp=128, ep=256, shared_expert_replicated=True), 256),
        (RolloutPlacement(tp=2, dp=64, ep=128, instances=2, shared_expert_replicated=True), 16),
    ],
    ids=["one instance, direct", "two instances, relayed"],
)
def test_the_cluster_layouts_on_256_ranks(rollout: RolloutPlacement, per_node: int) -> None:
    full = full_weights(CLUSTER, torch.bfloat16)
    nodes = [rank // per_node for rank in range(256)]
    outcome = reshard((CLUSTER_TRAIN, rollout), full, CLUSTER, 1 << 20, nodes)
    expert = np.array([".mlp.experts." in name for name in outcome.plan.names])[outcome.plan.remote.name]
    receivers = Counter(zip(outcome.plan.remote.name[expert], outcome.plan.remote.target[expert], strict=True))
    by_expert = Counter(name for name, _ in receivers)
    assert max(by_expert.values()) <= rollout.instances
