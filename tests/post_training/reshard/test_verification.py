"""Bitwise comparison of weights on one rank; test_exchange.py compares across ranks."""

import pytest
import torch
import torch_npu  # noqa: F401

from npu_emulator.counters import operator_calls
from post_training.checkpoint.megatron_form import local_shapes
from post_training.layouts.grouped_query import GroupedQueryShape, hf_shapes, table
from post_training.layouts.layout import PADDING, LocalView, RolloutPlacement, Shard, TrainPlacement, as_matrix
from post_training.reshard.exchange import Side
from post_training.reshard.verification import _equal_where_both, differing_tensors, first_copies

NAME = "model.layers.1.self_attn.o_proj.weight"
SHARD = Shard(NAME, ((0, 4), (0, 6)), "weight")


def compared(train: torch.Tensor, rollout: torch.Tensor, group) -> list[str]:
    sides = [Side({"weight": tensor.npu()}, [SHARD], {NAME: tensor.dtype}) for tensor in (train, rollout)]
    return differing_tensors(*sides, [[SHARD]], group, batch_bytes=1 << 20, device=torch.device("npu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_on_both_sides_is_not_equal(lone_rank, dtype):
    values = torch.randn(4, 6).to(dtype)
    assert compared(values, values.clone(), lone_rank) == []
    values[2, 3] = float("nan")
    assert compared(values, values.clone(), lone_rank) == [NAME]


def test_infinity_and_zero_are_compared_by_their_bits(lone_rank):
    values = torch.zeros(4, 6)
    values[0, 0] = float("inf")
    assert compared(values, values.clone(), lone_rank) == []
    assert compared(values, torch.where(values == 0, -values, values), lone_rank) == [NAME]


def test_weight_that_the_rollout_holds_rounded_is_not_equal(lone_rank):
    values = torch.ones(4, 6)
    assert compared(values, values.bfloat16(), lone_rank) == []
    values[2, 3] = 1 + 2**-10
    assert compared(values, values.bfloat16(), lone_rank) == [NAME]


def test_padding_that_is_not_zero_is_named_as_the_rollout_names_it(lone_rank):
    """The rollout's vocabulary has two more rows than the weight."""
    values = torch.randn(4, 6).npu()
    padded = torch.cat([values, torch.zeros(2, 6).npu()])
    held = Shard(NAME, SHARD.bounds, "padded", LocalView(index=((0, 4),)))
    padding = Shard(PADDING, ((0, 2), (0, 6)), "padded", LocalView(index=((4, 6),)))
    train = Side({"weight": values}, [SHARD], {NAME: values.dtype})
    rollout = Side({"padded": padded}, [held, padding], {NAME: values.dtype})

    def differing() -> list[str]:
        return differing_tensors(train, rollout, [[SHARD]], lone_rank, 1 << 20, torch.device("npu"))

    assert differing() == []
    padded[5, 0] = 1e-30
    assert differing() == ["padded"]


@pytest.mark.parametrize("rows", [(2, 8), (3, 9), (4, 10)])
def test_only_the_overlap_of_two_slices_is_compared(rows):
    """The slices overlap, touch, or are apart in rows, and have the same columns."""
    whole = torch.arange(60.0).view(10, 6)
    bounds, other = ((0, 3), (0, 6)), (rows, (0, 6))
    mine, theirs = whole[:3].clone(), whole[rows[0] : rows[1]].clone()
    assert _equal_where_both(bounds, mine, other, theirs) and _equal_where_both(other, theirs, bounds, mine)
    mine[2, 5] = -1
    assert _equal_where_both(bounds, mine, other, theirs) == (rows[0] > 2)
    theirs[-1] = -2
    assert _equal_where_both(other, theirs, bounds, mine) == (rows[0] > 2)


SHAPE = GroupedQueryShape(
    hidden=12, intermediate=8, layers=2, heads=6, kv_heads=2, head_dim=4, vocab=10, tied=False, bias=True
)
TRAIN = (TrainPlacement(tp=2, pp=1, ep=1, dp=2, num_layer_list=(2,)), TrainPlacement(1, 2, 1, 2, (1, 1)))


def layouts_of(placement: TrainPlacement) -> list[list[Shard]]:
    return [table(SHAPE).megatron(placement, rank) for rank in range(placement.world_size)]


@pytest.mark.parametrize("placement", TRAIN, ids=("tensors", "stages"))
def test_first_copies_hold_every_element_once(placement):
    """A rank has several shards of the queries, keys and values, and replicas have the same ones."""
    held = {name: torch.zeros(as_matrix(shape), dtype=torch.int) for name, shape in hf_shapes(SHAPE).items()}
    for shards in first_copies(layouts_of(placement)):
        for shard in shards:
            held[shard.hf_name][tuple(slice(*interval) for interval in shard.bounds)] += 1
    assert all(bool((count == 1).all()) for count in held.values())


def test_any_differing_element_detected(lone_rank):
    """Change one element of each rollout shard in turn."""
    drawn = torch.Generator().manual_seed(0)
    full = {name: torch.randn(shape, generator=drawn).npu() for name, shape in hf_shapes(SHAPE).items()}
    train, shards = layouts_of(TrainPlacement(1, 1, 1, 1, (2,)))[0], table(SHAPE).vllm_ascend(RolloutPlacement(1), 0)
    types = dict.fromkeys(full, torch.float32)
    sides = [Side(local_tensors(held, full), held, types) for held in (train, shards)]

    def differing() -> list[str]:
        return differing_tensors(*sides, [train], lone_rank, 1 << 20, torch.device("npu"))

    assert differing() == []
    for shard in train:
        region = next(each for each in shards if each.hf_name == shard.hf_name).locate(sides[1].tensors)
        last = tuple(stop - 1 for _, stop in shard.bounds)
        kept = region[last].clone()
        region[last] += 1
        assert differing() == [shard.hf_name], shard
        region[last] = kept
    assert differing() == []


def local_tensors(shards: list[Shard], full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a rank's tensors for these shards, filled from the full weights."""
    tensors = {name: torch.zeros(shape).npu() for name, shape in local_shapes(shards).items()}
    for shard in shards:
        if shard.hf_name != PADDING:
            shard.locate(tensors).copy_(full[shard.hf_name][tuple(slice(*interval) for interval in shard.bounds)])
    return tensors


MANY = [Shard(f"{NAME}.{number}", ((0, 4), (0, 6)), f"weight{number}") for number in range(12)]


def of_many(rollout: dict[str, torch.Tensor], shards: list[Shard], group, train: dict[str, torch.Tensor]) -> list[str]:
    """Compare weights that fit in one batch."""
    types = {shard.hf_name: train[shard.local].dtype for shard in MANY}
    sides = Side(train, MANY, types), Side(rollout, shards, types)
    return differing_tensors(*sides, [MANY], group, 1 << 20, torch.device("npu"))


def many_weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {shard.local: torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(dtype).npu()
            for number, shard in enumerate(MANY)}  # fmt: skip


def test_weights_of_a_batch_are_compared_at_once(lone_rank):
    train, rollout = many_weights(), many_weights()
    before = operator_calls().get("aclnnEqual", 0)
    assert of_many(rollout, MANY, lone_rank, train) == []
    assert operator_calls()["aclnnEqual"] - before == 2  # once as bytes and once as values


@pytest.mark.parametrize("value", [float("nan"), -0.0, 1e-30], ids=["nan", "minus zero", "small"])
@pytest.mark.parametrize("rounded", [False, True], ids=["types agree", "one is rounded"])
def test_weight_that_differs_in_a_batch_is_named(lone_rank, value, rounded):
    train, rollout = many_weights(torch.bfloat16), many_weights(torch.bfloat16)
    if rounded:
        rollout["weight0"] = rollout["weight0"].float()
    train["weight7"][3, 5] = rollout["weight7"][3, 5] = 0
    assert of_many(rollout, MANY, lone_rank, train) == []
    rollout["weight7"][3, 5] = value
    if value != value:
        train["weight7"][3, 5] = value
    assert of_many(rollout, MANY, lone_rank, train) == [MANY[7].hf_name]


@pytest.mark.parametrize("damaged", ["weight3", "again"])
def test_both_copies_of_a_weight_are_compared(lone_rank, damaged):
    train, rollout = many_weights(), many_weights()
    rollout["again"] = rollout["weight3"].clone()
    shards = [*MANY, Shard(MANY[3].hf_name, MANY[3].bounds, "again")]
    assert of_many(rollout, shards, lone_rank, train) == []
    rollout[damaged][0, 0] += 1
    assert of_many(rollout, shards, lone_rank, train) == [MANY[3].hf_name]


def test_halves_of_a_weight_are_each_compared(lone_rank):
    """Elements that the rollout does not have are not compared: NaN there is no difference."""
    train, rollout = many_weights(), many_weights()
    halves = [Shard(MANY[3].hf_name, (rows, (0, 4)), name) for name, rows in (("top", (0, 2)), ("low", (2, 4)))]
    shards = [shard for shard in MANY if shard.local != "weight3"] + halves
    rollout |= {"top": train["weight3"][:2, :4].clone(), "low": train["weight3"][2:, :4].clone()}
    train["weight3"][1, 5] = float("nan")
    assert of_many(rollout, shards, lone_rank, train) == []
    rollout["low"][1, 3] += 1
    assert of_many(rollout, shards, lone_rank, train) == [MANY[3].hf_name]
