"""Contents, staging and progress of buckets, on hand-written layouts in one process."""

import dataclasses
from collections.abc import Sequence
from random import Random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from post_training.layouts.layout import RolloutPlacement, Shard, TrainPlacement
from post_training.models.deepseek_v3 import megatron, vllm_ascend
from post_training.reshard.exchange import Exchange, Side, Staging, pack
from post_training.reshard.failure import Attempt
from post_training.reshard.plan import ReshardPlan, Transfers, make_plan
from post_training.reshard.schedule import ALIGNMENT, Bucket, Chunk, Direction, bucket_count, schedule, shard_origins
from tests.post_training.layouts.placements import layout_pairs
from tests.post_training.layouts.reference import SMALL

NAMES = ("bias", "norm", "scale")
TYPES = {"bias": torch.bfloat16, "norm": torch.bfloat16, "scale": torch.float32}
VALUES = {name: torch.arange(3).to(kind) for name, kind in TYPES.items()}
HELD = [Shard(name, ((0, 3),), name) for name in NAMES]


def plan_of(
    train: Sequence[list[Shard]], rollout: Sequence[list[Shard]], node_of: Sequence[int] | None = None
) -> ReshardPlan:
    return make_plan(train, rollout, lambda name: TYPES[name].itemsize, node_of)


def buckets_of(plan: ReshardPlan, rank: int) -> list[Bucket]:
    return schedule(plan.remote, 2, rank, 1, (shard_origins(HELD), shard_origins(HELD)))


def test_elements_of_several_widths_are_aligned_in_their_stream() -> None:
    """By name, three two-byte elements come first, and the four-byte elements after them would start at byte 6."""
    (sends,) = buckets_of(plan_of([HELD, []], [[], HELD]), rank=0)
    offsets = {HELD[chunk.shard].hf_name: chunk.start for chunk in sends.send.chunks}
    assert offsets == {"scale": 0, "bias": 12, "norm": 18}
    buffer = torch.empty(sends.send.size, dtype=torch.uint8)
    pack(Side(VALUES, HELD, TYPES), sends.send, buffer)
    assert buffer[:12].view(torch.float32).tolist() == [0, 1, 2]


def test_the_part_of_every_peer_begins_aligned() -> None:
    """Rank 1 gets three two-byte elements; the four-byte ones for rank 2 would start at byte 6."""
    plan = plan_of([[HELD[0], HELD[2]], [], []], [[], [HELD[0]], [HELD[2]]])
    (bucket,) = schedule(plan.remote, 3, 0, 1, (shard_origins([HELD[0], HELD[2]]), shard_origins([HELD[0]])))
    assert bucket.send.splits == (0, ALIGNMENT, ALIGNMENT)
    assert [chunk.start for chunk in bucket.send.chunks] == [0, ALIGNMENT]


def test_plans_that_differ_in_what_is_relayed_alone_have_different_digests() -> None:
    """Both plans send the weight from rank 0 to rank 1; only one forwards it to rank 2 on the same node."""
    held = HELD[:1]
    without = plan_of([held, [], []], [[], held, []], [0, 1, 1])
    relaying = plan_of([held, [], []], [[], held, held], [0, 1, 1])
    assert (len(without.relay), len(relaying.relay)) == (0, 1)
    for column in ("source", "target", "source_shard", "target_shard", "name", "bounds", "bytes"):
        assert getattr(without.remote, column).tolist() == getattr(relaying.remote, column).tolist()
    assert without.digest != relaying.digest
    assert relaying.digest == plan_of([held, [], []], [[], held, held], [0, 1, 1]).digest


@pytest.mark.parametrize("sends_to_all", [True, False])
def test_many_peers_of_one_rank_do_not_overfill_its_buckets(sends_to_all: bool) -> None:
    """Send eight weights of 11 rows of 100 bytes, each to or from another rank; shards are split at rows."""
    weights = [Shard(f"weight{number}", ((0, 11), (0, 100)), f"weight{number}") for number in range(8)]
    central: list[list[Shard]] = [weights, *([] for _ in weights)]
    apart: list[list[Shard]] = [[], *([weight] for weight in weights)]
    train, rollout = (central, apart) if sends_to_all else (apart, central)
    plan, limit = make_plan(train, rollout, lambda name: 1), 4600
    count = bucket_count(plan.remote, 9, limit)
    origins = shard_origins(train[0]), shard_origins(rollout[0])
    buckets = schedule(plan.remote, 9, 0, count, origins)
    assert sum(bucket.send.size + bucket.receive.size for bucket in buckets) >= 8 * 1100
    assert all(max(bucket.send.size, bucket.receive.size) <= limit for bucket in buckets)


def test_the_peer_of_a_chunk_that_fills_its_part_is_that_part_s() -> None:
    rows = ((0, 1), (0, 16))
    first, second = Chunk(0, rows, 0, 16), Chunk(1, rows, 16, 32)
    direction = Direction((16, 0, 16), (first, second))
    assert [direction.peer(chunk) for chunk in (first, second)] == [0, 2]


@pytest.mark.parametrize("slots, buckets, held", [(1, 2, 1), (2, 1, 1), (2, 2, 2), (2, 0, 0)])
def test_staging_has_a_buffer_for_each_bucket_in_flight(slots: int, buckets: int, held: int) -> None:
    (sends,) = buckets_of(plan_of([HELD, []], [[], HELD]), rank=0)
    (receives,) = buckets_of(plan_of([HELD, []], [[], HELD]), rank=1)
    step = Bucket(sends.send, receives.receive)
    staging = Staging([step] * buckets, slots, torch.device("cpu"))
    assert [len(each) for each in (staging.send, staging.receive)] == [held, held]
    assert staging.bytes == held * (sends.send.size + receives.receive.size)


Piece = tuple[int, tuple[tuple[int, int], tuple[int, int]], int, int]


def naive_directions(
    transfers: Transfers, sends: bool, shards: Sequence[Shard], world_size: int, buckets: int
) -> list[tuple[list[int], list[Piece]]]:
    """Assign row by row: a row goes into the last bucket that begins before the row ends."""
    origins = shard_origins(shards).tolist()
    found = []
    for bucket in range(buckets):
        splits, pieces, offset = [], list[Piece](), 0
        for peer in range(world_size):
            begun = offset
            stream = transfers.select((transfers.target if sends else transfers.source) == peer)
            total, passed = int(stream.bytes.sum()), 0
            for entry in range(len(stream)):
                row, row_stop, column, column_stop = stream.bounds[entry].tolist()
                size = int(stream.bytes[entry]) // (row_stop - row)
                ends = [passed + size * count for count in range(1, row_stop - row + 1)]
                passed = ends[-1]
                within = [
                    place
                    for place, end in enumerate(ends)
                    if max(mark for mark in range(buckets) if total * mark // buckets < end) == bucket
                ]
                if not within:
                    continue
                shard = int((stream.source_shard if sends else stream.target_shard)[entry])
                low, left = origins[shard]
                rows = (row - low + within[0], row - low + within[-1] + 1)
                size *= len(within)
                pieces.append((shard, (rows, (column - left, column_stop - left)), offset, offset + size))
                offset += size
            offset += -offset % ALIGNMENT
            splits.append(offset - begun)
        found.append((splits, pieces))
    return found


@settings(max_examples=60)
@given(layout_pairs(worlds=(1, 2, 3, 4, 6)), st.sampled_from([0, 1, 2, 3, 7]), st.randoms(use_true_random=False))
def test_buckets_are_those_of_a_naive_cut(
    pair: tuple[TrainPlacement, RolloutPlacement], buckets: int, random: Random
) -> None:
    ranks = range(pair[0].world_size)
    train, rollout = (
        [megatron(SMALL, pair[0], rank) for rank in ranks],
        [vllm_ascend(SMALL, pair[1], rank) for rank in ranks],
    )
    plan = make_plan(train, rollout, lambda name: 4 if "norm" in name else 2)
    rank = random.choice(ranks)
    for leg in (plan.remote, plan.local):
        origins = shard_origins(train[rank]), shard_origins(rollout[rank])
        found = schedule(leg, len(ranks), rank, buckets, origins)
        for sends, shards, ends in ((True, train, leg.source), (False, rollout, leg.target)):
            expected = naive_directions(leg.select(ends == rank), sends, shards[rank], len(ranks), buckets)
            sides = [step.send if sends else step.receive for step in found]
            assert [
                (list(side.splits), [(each.shard, each.narrow, each.start, each.stop) for each in side.chunks])
                for side in sides
            ] == expected


def no_answer(*_: object, **__: object) -> None:
    raise RuntimeError("no answer")


def test_how_far_a_rank_came_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_to_all_single", no_answer)
    (step,) = buckets_of(plan_of([HELD, []], [[], HELD]), rank=1)
    side, attempt = Side(VALUES, HELD, TYPES), Attempt()
    exchange = Exchange("leg of the test", [step], side, side, Mock(dist.ProcessGroup), 1, torch.device("cpu"))
    assert attempt.reached == "before the first bucket"
    with pytest.raises(RuntimeError, match="no answer"):
        exchange.run(attempt)
    assert attempt.reached == "in bucket 1 of 1 of the leg of the test"


def test_bucket_that_passes_bytes_on_needs_one_slot() -> None:
    (step,) = buckets_of(plan_of([HELD, []], [[], HELD]), rank=1)
    passing = dataclasses.replace(step, forward=np.zeros((0, 3), dtype=np.int64))
    side = Side(VALUES, HELD, TYPES)

    def exchange(steps: list[Bucket], slots: int) -> Exchange:
        return Exchange("leg of the test", steps, side, side, Mock(dist.ProcessGroup), slots, torch.device("cpu"))

    assert exchange([step], 2).slots == 2
    assert exchange([step, passing], 1).slots == 1
    with pytest.raises(ValueError, match=r"slots=2 is invalid: the leg of the test passes bytes on. Set it to 1\."):
        exchange([step, passing], 2)
