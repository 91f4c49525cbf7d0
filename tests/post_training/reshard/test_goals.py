"""Goals of a weight update, counted on the plans of all ranks; each check is shown to fail on a worse plan."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from benchmarks.reshard_planning import sharded
from post_training.layouts.layout import RolloutPlacement, Shard, TrainPlacement
from post_training.layouts.regions import regions_of
from post_training.models.deepseek_v3 import table
from post_training.reshard import rank_plan
from post_training.reshard.rank_plan import RankPlan, make_rank_plan
from post_training.reshard.schedule import Bucket, buckets_of_traffic, schedule, shard_origins
from tests.post_training.layouts.reference import SMALL

TABLE = table(replace(SMALL, layers=12))
NAMES = tuple(TABLE.shapes)
RANKS, BYTES, BUCKET = 8, 2, 12_000
MOST_SENT, MOST_COLLECTIVES = 1.05, 40
Layouts = list[list[Shard]]


def megatron() -> Layouts:
    placement = TrainPlacement(tp=2, pp=1, ep=1, dp=4, num_layer_list=(12,), vocab_padded=120)
    return [TABLE.megatron(placement, rank) for rank in range(RANKS)]


def fsdp2() -> Layouts:
    return [list(sharded(TABLE, 2, rank % 2)) for rank in range(RANKS)]


def served() -> Layouts:
    placement = RolloutPlacement(tp=2, dp=4, ep=8)
    return [TABLE.vllm_ascend(placement, rank) for rank in range(RANKS)]


def shared_dies(train: Layouts) -> tuple[Layouts, Layouts]:
    return train, served()


def separate_dies(train: Layouts) -> tuple[Layouts, Layouts]:
    nothing: Layouts = [[] for _ in range(RANKS)]
    return [*train, *nothing], [*nothing, *served()]


@dataclass(frozen=True)
class Update:
    """Plans of all ranks, and the layouts that they connect."""

    train: Layouts
    rollout: Layouts
    plans: list[RankPlan]

    @classmethod
    def of(cls, train: Layouts, rollout: Layouts, told: Layouts | None = None) -> "Update":
        """Plan an update; `told`: training's layouts as given to the planner, if not the true ones."""
        held, needed = ([regions_of(shards, NAMES) for shards in layouts] for layouts in (told or train, rollout))
        ranks = range(len(train))
        return cls(train, rollout, [make_rank_plan(held, needed, NAMES, lambda _: BYTES, rank) for rank in ranks])

    def received_over_bound(self) -> dict[int, float]:
        """Return, for each rank that lacks anything, received bytes over the lower bound from counting elements."""
        found = {}
        for plan, held, needed, rank in zip(self.plans, self.train, self.rollout, range(len(self.train)), strict=True):
            masks = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in TABLE.shapes.items()}
            for shard in filter(lambda each: each.hf_name, held):
                masks[shard.hf_name][tuple(slice(*edge) for edge in shard.bounds)] = True
            regions = [(each.hf_name, tuple(slice(*edge) for edge in each.bounds)) for each in needed if each.hf_name]
            bound = BYTES * sum(int((~masks[name][region]).sum()) for name, region in regions)
            received = int(plan.remote.bytes[plan.remote.target == rank].sum())
            assert bound or not received
            if bound:
                found[rank] = received / bound
        return found

    def most_sent(self) -> float:
        """Return the bytes sent by the busiest training rank, over the mean of all."""
        sent = [int(plan.remote.bytes[plan.remote.source == rank].sum()) for rank, plan in enumerate(self.plans)]
        return max(sent) * sum(map(bool, self.train)) / sum(sent)

    def bucket_count(self, bucket: int = BUCKET) -> int:
        traffic = self.plans[0].traffic
        return buckets_of_traffic(traffic - np.diag(np.diag(traffic)), self.plans[0].widest_row, bucket)

    def staged(self, buckets: int) -> int:
        """Return the most bytes that a rank stages in one of its two directions."""
        steps = [step for rank in range(len(self.train)) for step in self.buckets_of(rank, buckets)]
        return max(max(step.send.size, step.receive.size) for step in steps)

    def buckets_of(self, rank: int, buckets: int) -> list[Bucket]:
        origins = shard_origins(self.train[rank]), shard_origins(self.rollout[rank])
        return schedule(self.plans[rank].remote, len(self.train), rank, buckets, origins)


@pytest.fixture(
    params=[(side, train) for side in (shared_dies, separate_dies) for train in (megatron, fsdp2)],
    ids=lambda pair: " ".join(part.__name__ for part in pair),
)
def layouts(request: pytest.FixtureRequest) -> tuple[Layouts, Layouts]:
    side, train = request.param
    return side(train())


def test_bytes_received_are_the_bound(layouts):
    ratios = Update.of(*layouts).received_over_bound()
    assert len(ratios) > RANKS // 2 and set(ratios.values()) == {1.0}


def test_bytes_above_the_bound_are_counted():
    """A shard that rank 0 both holds and needs is hidden from the planner, so another rank sends it."""
    train, rollout = shared_dies(megatron())
    needed = {shard.hf_name for shard in rollout[0]}
    dropped = next(shard for shard in train[0] if shard.hf_name in needed)
    told = [[shard for shard in train[0] if shard is not dropped], *train[1:]]
    assert Update.of(train, rollout, told).received_over_bound()[0] > 1.0


def test_busiest_sender_is_near_the_mean(layouts):
    assert Update.of(*layouts).most_sent() <= MOST_SENT


def test_senders_that_take_no_turns_are_seen(layouts, monkeypatch):
    monkeypatch.setattr(rank_plan, "running", lambda keys, _: np.zeros(len(keys), dtype=np.int64))
    assert Update.of(*layouts).most_sent() > MOST_SENT


def test_two_buckets_are_staged_in_few_collectives(layouts):
    update = Update.of(*layouts)
    count = update.bucket_count()
    assert count > 1 and update.staged(count) <= BUCKET
    assert count + 1 <= MOST_COLLECTIVES  # plus the final agreement of all ranks


def test_fewer_and_more_buckets_miss_a_goal(layouts):
    """Half as many buckets overfill the staging memory; buckets of a tenth of it take too many collectives."""
    update = Update.of(*layouts)
    assert update.staged(update.bucket_count() // 2) > BUCKET
    assert update.bucket_count(BUCKET // 10) + 1 > MOST_COLLECTIVES
