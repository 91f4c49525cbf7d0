"""Plans that pass on inside nodes: all ranks in one process, against a naive count and the weights themselves."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reshard_planning import BUCKET, CASES, make_inputs
from post_training.layouts.layout import PADDING, RolloutPlacement, Shard, TrainPlacement
from post_training.layouts.regions import regions_of, rollout_regions
from post_training.plan.placement_text import parse_model
from post_training.reshard import relays
from post_training.reshard.exchange import Side, pack, pass_on, scatter
from post_training.reshard.rank_plan import Joined, make_rank_plan
from post_training.reshard.relays import Load, RelayedPlan
from post_training.reshard.schedule import Bucket, BucketError, shard_origins
from tests.post_training.layouts.placements import layout_pairs
from tests.post_training.layouts.reference import SMALL, State, megatron_state, rollout_state, same_bits
from tests.post_training.reshard.test_plan import FULL, layouts

Layouts = Sequence[Sequence[Shard]]
NAMES = tuple(FULL)


def plans(train: Layouts, rollout: Layouts, nodes: Sequence[int], itemsize: int = 4) -> list[RelayedPlan]:
    held, needed = ([regions_of(shards, NAMES) for shards in side] for side in (train, rollout))
    joined = Joined.of(held, needed, NAMES, lambda _: itemsize)
    return [RelayedPlan(joined, rank, np.array(nodes)) for rank in range(len(train))]


def buckets_of(made: Sequence[RelayedPlan], train: Layouts, rollout: Layouts, bucket_bytes: int) -> list[list[Bucket]]:
    count = max(plan.load.buckets(bucket_bytes) for plan in made)
    return [
        plan.buckets(count, (shard_origins(train[rank]), shard_origins(rollout[rank])))
        for rank, plan in enumerate(made)
    ]


def run(buckets: Sequence[Sequence[Bucket]], source: Sequence[Side], target: Sequence[Side]) -> None:
    """Exchange the buckets of all ranks, with memory copies in place of the collective."""
    world = range(len(buckets))
    received = [torch.empty(0, dtype=torch.uint8) for _ in world]
    for number in range(len(buckets[0])):
        sent = []
        for rank in world:
            step = buckets[rank][number]
            buffer = torch.full((step.send.size,), 255, dtype=torch.uint8)
            pack(source[rank], step.send, buffer)
            pass_on(step.forward, received[rank], buffer)
            sent.append(buffer.split(step.send.splits))
        for rank in world:
            step = buckets[rank][number]
            parts = [sent[peer][rank] for peer in world]
            assert tuple(map(len, parts)) == step.receive.splits
            received[rank] = torch.cat(parts)
            scatter(target[rank], step.receive, received[rank])


def copy_own(plan: RelayedPlan, rank: int, source: Side, target: Side) -> None:
    """Copy the regions that stay on the rank, one by one."""
    local = plan.local
    for held, needed, bounds in zip(local.source_shard, local.target_shard, local.bounds.tolist(), strict=True):
        views = []
        for side, number in ((source, held), (target, needed)):
            shard = side.shards[number]
            edges = [(bounds[0], bounds[1]), (bounds[2], bounds[3])][: len(shard.bounds)]
            place = tuple(slice(a - begin, b - begin) for (a, b), (begin, _) in zip(edges, shard.bounds, strict=True))
            views.append(shard.locate(side.tensors)[place])
        views[1].copy_(views[0])


def reshard(
    pair: tuple[TrainPlacement, RolloutPlacement], full: State, nodes: Sequence[int], bucket_bytes: int
) -> tuple[list[RelayedPlan], list[list[Bucket]]]:
    """Reshard, and compare every rank with the naive reference."""
    train, rollout = layouts(pair)
    ranks = range(len(train))
    expected = [rollout_state(full, SMALL, pair[1], rank) for rank in ranks]
    targets = [{name: torch.full_like(value, torch.nan) for name, value in state.items()} for state in expected]
    types = dict.fromkeys(NAMES, torch.float32)
    source = [Side(megatron_state(full, SMALL, pair[0], rank), train[rank], types) for rank in ranks]
    target = [Side(targets[rank], rollout[rank], types) for rank in ranks]
    made = plans(train, rollout, nodes)
    buckets = buckets_of(made, train, rollout, bucket_bytes)
    for rank in ranks:
        for shard in rollout[rank]:
            if shard.hf_name == PADDING:
                shard.locate(targets[rank]).zero_()
        copy_own(made[rank], rank, source[rank], target[rank])
    run(buckets, source, target)
    for rank in ranks:
        for name, value in expected[rank].items():
            assert same_bits(targets[rank][name], value), (rank, name)
    return made, buckets


@settings(max_examples=80)
@given(
    layout_pairs(worlds=(1, 2, 3, 4, 6, 8, 12)),
    st.sampled_from([40_000, 200_000, 1 << 30]),
    st.sampled_from([1, 2, 3, 4]),
)
def test_random_layouts_are_exact_and_bounded(pair, bucket_bytes, per_node):
    nodes = [rank // per_node for rank in range(pair[0].world_size)]
    made, buckets = reshard(pair, FULL, nodes, bucket_bytes)
    sizes = [step.size for rank in buckets for each in rank for step in (each.send, each.receive)]
    assert max(sizes, default=0) <= bucket_bytes
    assert len({plan.digest for plan in made}) == 1


TWO_STAGES = TrainPlacement(tp=2, pp=2, ep=1, dp=2, num_layer_list=(1, 2), vocab_padded=120)
SERVED = RolloutPlacement(tp=2, dp=4, ep=8)
TWO_NODES = [0] * 4 + [1] * 4


def test_a_copy_from_another_place_is_seen(monkeypatch):
    reshard((TWO_STAGES, SERVED), FULL, TWO_NODES, 200_000)
    in_runs = relays._in_runs
    monkeypatch.setattr(relays, "_in_runs", lambda copies: np.maximum(in_runs(copies) - [16, 0, 0], 0))
    with pytest.raises(AssertionError):
        reshard((TWO_STAGES, SERVED), FULL, TWO_NODES, 200_000)


def lacking(train: Sequence[Shard], rollout: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """Which elements of each tensor the second layout has and the first has not."""
    found = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in FULL.items()}
    for side, value in ((rollout, True), (train, False)):
        for shard in side:
            if shard.hf_name != PADDING:
                found[shard.hf_name][tuple(slice(*edge) for edge in shard.bounds)] = value
    return found


@settings(max_examples=40)
@given(layout_pairs(worlds=(2, 3, 4, 6, 8, 12)), st.sampled_from([1, 2, 3, 4]))
def test_each_missing_element_is_received_once_and_enters_its_node_once(pair, per_node):
    """Against a naive count of elements. What a node needs and trains itself does not enter it."""
    train, rollout = layouts(pair)
    nodes = [rank // per_node for rank in range(len(train))]
    buckets = buckets_of(plans(train, rollout, nodes), train, rollout, 1 << 30)
    received = [sum(each.receive.chunk_bytes for each in rank) for rank in buckets]
    masks = [lacking(*sides) for sides in zip(train, rollout, strict=True)]
    assert received == [4 * sum(int(mask.sum()) for mask in each.values()) for each in masks]
    for node in set(nodes):
        inside = [rank for rank, of_rank in enumerate(nodes) if of_rank == node]
        trained, served = ([shard for rank in inside for shard in side[rank]] for side in (train, rollout))
        needed = 4 * sum(int(mask.sum()) for mask in lacking(trained, served).values())
        entered = sum(
            chunk.stop - chunk.start
            for rank in inside
            for each in buckets[rank]
            for chunk in each.receive.chunks
            if nodes[each.receive.peer(chunk)] != node
        )
        assert entered == needed


def test_regions_needed_twice_by_a_rank_fill_both():
    """Tied embeddings: a rank that passes a region on has another place for it itself."""
    name, rows = NAMES[0], FULL[NAMES[0]].shape[0]
    held = Shard(name, ((0, rows), (0, 4)), "w")
    twice = [Shard(name, ((0, rows), (0, 4)), local) for local in ("embedding", "output")]
    train, rollout = [[held], [], []], [[], twice, twice[:1]]
    weights = torch.arange(rows * 4.0).view(rows, 4)
    types = {name: torch.float32}
    targets = [{local: torch.full_like(weights, torch.nan) for local in ("embedding", "output")} for _ in train]
    made = plans(train, rollout, [0, 1, 1])
    run(
        buckets_of(made, train, rollout, 1 << 20),
        [Side({"w": weights}, shards, types) for shards in train],
        [Side(target, shards, types) for target, shards in zip(targets, rollout, strict=True)],
    )
    assert all(same_bits(found, weights) for found in (*targets[1].values(), targets[2]["embedding"]))


def test_one_node_passes_nothing_on():
    train, rollout = layouts((TWO_STAGES, SERVED))
    one, two = plans(train, rollout, [0] * 8), plans(train, rollout, TWO_NODES)
    assert [one[0].passes_on, two[0].passes_on] == [False, True]
    assert one[0].digest != two[0].digest
    count = max(plan.load.buckets(200_000) for plan in one)
    origins = shard_origins(train[0]), shard_origins(rollout[0])
    assert [len(plan[0].buckets(count, origins)) - count for plan in (one, two)] == [0, 1]


def test_bucket_smaller_than_all_streams_rejected():
    load = Load(bytes=5000, streams=3, widest_row=100)
    assert load.buckets(3 * 116 + 1) == 5000
    with pytest.raises(
        BucketError, match="348 bytes cannot hold a row of up to 100 bytes for each of 3 streams"
    ) as told:
        load.buckets(3 * 116)
    assert load.buckets(told.value.least) == 5000


# Origins of shards, whose places in the weights do not matter for what is sent.
UNPLACED = (np.zeros((100_000, 2), dtype=np.int64),) * 2


def published(name: str) -> tuple[Joined, np.ndarray, np.ndarray]:
    """Return both sides of a published model, the nodes of 16 dies, and the bytes between ranks without forwarding."""
    case = CASES[name]
    table = parse_model(case.model)
    names = tuple(table.shapes)
    _, train = make_inputs(case, table, 0, names)
    sides = train, rollout_regions(table, case.rollout)
    traffic = make_rank_plan(*sides, names, lambda _: 2, 0).traffic
    np.fill_diagonal(traffic, 0)
    return Joined.of(*sides, names, lambda _: 2), np.arange(case.ranks) // 16, traffic


def test_goals_of_deepseek_on_256_dies():
    """Without forwarding, the ranks that own a layer are the only ones that send it."""
    joined, nodes, traffic = published("deepseek-256")
    made = [RelayedPlan(joined, rank, nodes) for rank in range(len(nodes))]
    count = max(plan.load.buckets(BUCKET) for plan in made)
    sent, staged, enters = [], 0, 0
    for rank, plan in enumerate(made):
        buckets = plan.buckets(count, UNPLACED)
        to = np.sum([each.send.splits for each in buckets], axis=0)
        sent.append(int(to.sum()))
        staged = max(staged, *(step.size for each in buckets for step in (each.send, each.receive)))
        enters += int(to[nodes != nodes[rank]].sum())
    assert max(sent) * len(sent) <= 1.05 * sum(sent)
    assert staged <= BUCKET and len(buckets) + 1 <= 40  # the last collective is the agreement of all ranks
    alike = traffic.sum(axis=1)
    assert alike.max() > 1.3 * alike.mean()
    into = traffic.reshape(16, 16, 16, 16).sum(axis=(1, 3))
    assert 3 * enters < into.sum() - np.trace(into)


def test_owners_send_alike_though_some_serve_their_own_node():
    """Qwen3-235B on 1,024 dies: one of the four owners of an expert has a receiver in its own node."""
    joined, nodes, traffic = published("qwen-1024")
    sent = []
    for rank in (*range(0, 128, 32), *range(512, 640, 32)):  # owners of the same experts, of two stages
        plan = RelayedPlan(joined, rank, nodes)
        sent.append(sum(each.send_bytes for each in plan.buckets(plan.load.buckets(BUCKET), UNPLACED)))
    assert max(sent) * len(nodes) <= 1.05 * traffic.sum()
