"""The comparison of weights bit for bit, on one rank; across ranks it is in test_exchange.py."""

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.checkpoint.megatron_form import local_shapes
from post_training.layouts.grouped_query import GroupedQueryShape, canonical_shapes, table
from post_training.layouts.layout import PADDING, LocalView, Piece, RolloutPlacement, TrainPlacement, as_matrix
from post_training.reshard.exchange import Side
from post_training.reshard.verification import _equal_where_both, differing_tensors, first_copies

NAME = "model.layers.1.self_attn.o_proj.weight"
PIECE = Piece(NAME, ((0, 4), (0, 6)), "weight")


def compared(train: torch.Tensor, rollout: torch.Tensor, group) -> list[str]:
    sides = [Side({"weight": tensor.npu()}, [PIECE], {NAME: tensor.dtype}) for tensor in (train, rollout)]
    return differing_tensors(*sides, [[PIECE]], group, batch_bytes=1 << 20, device=torch.device("npu"))


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


def test_padding_that_is_not_zero_is_named_as_the_rollout_names_it(lone_rank):
    """The rollout's vocabulary has two rows more than the weight."""
    values = torch.randn(4, 6).npu()
    padded = torch.cat([values, torch.zeros(2, 6).npu()])
    held = Piece(NAME, PIECE.box, "padded", LocalView(index=((0, 4),)))
    padding = Piece(PADDING, ((0, 2), (0, 6)), "padded", LocalView(index=((4, 6),)))
    train = Side({"weight": values}, [PIECE], {NAME: values.dtype})
    rollout = Side({"padded": padded}, [held, padding], {NAME: values.dtype})

    def differing() -> list[str]:
        return differing_tensors(train, rollout, [[PIECE]], lone_rank, 1 << 20, torch.device("npu"))

    assert differing() == []
    padded[5, 0] = 1e-30
    assert differing() == ["padded"]


@pytest.mark.parametrize("rows", [(2, 8), (3, 9), (4, 10)])
def test_of_two_boxes_only_what_both_hold_is_compared(rows):
    """They overlap, touch, and lie apart; along the other axis they are equal."""
    whole = torch.arange(60.0).view(10, 6)
    box, other = ((0, 3), (0, 6)), (rows, (0, 6))
    mine, theirs = whole[:3].clone(), whole[rows[0] : rows[1]].clone()
    assert _equal_where_both(box, mine, other, theirs) and _equal_where_both(other, theirs, box, mine)
    mine[2, 5] = -1
    assert _equal_where_both(box, mine, other, theirs) == (rows[0] > 2)
    theirs[-1] = -2
    assert _equal_where_both(other, theirs, box, mine) == (rows[0] > 2)


SHAPE = GroupedQueryShape(
    hidden=12, intermediate=8, layers=2, heads=6, kv_heads=2, head_dim=4, vocab=10, tied=False, bias=True
)
TRAIN = (TrainPlacement(tp=2, pp=1, ep=1, dp=2, num_layer_list=(2,)), TrainPlacement(1, 2, 1, 2, (1, 1)))


def layouts_of(placement: TrainPlacement) -> list[list[Piece]]:
    return [table(SHAPE).megatron(placement, rank) for rank in range(placement.world_size)]


@pytest.mark.parametrize("placement", TRAIN, ids=("tensors", "stages"))
def test_first_copies_hold_every_element_once(placement):
    """Of queries, keys and values a rank has several parts of each, and replicas have the same ones."""
    held = {name: torch.zeros(as_matrix(shape), dtype=torch.int) for name, shape in canonical_shapes(SHAPE).items()}
    for pieces in first_copies(layouts_of(placement)):
        for piece in pieces:
            held[piece.canonical][tuple(slice(*interval) for interval in piece.box)] += 1
    assert all(bool((count == 1).all()) for count in held.values())


def test_any_element_that_differs_is_noticed(lone_rank):
    """Every piece of the rollout, of which one element at a time is another one than in training."""
    drawn = torch.Generator().manual_seed(0)
    full = {name: torch.randn(shape, generator=drawn).npu() for name, shape in canonical_shapes(SHAPE).items()}
    train, pieces = layouts_of(TrainPlacement(1, 1, 1, 1, (2,)))[0], table(SHAPE).vllm_ascend(RolloutPlacement(1), 0)
    types = dict.fromkeys(full, torch.float32)
    sides = [Side(local_tensors(held, full), held, types) for held in (train, pieces)]

    def differing() -> list[str]:
        return differing_tensors(*sides, [train], lone_rank, 1 << 20, torch.device("npu"))

    assert differing() == []
    for piece in train:
        region = next(each for each in pieces if each.canonical == piece.canonical).locate(sides[1].tensors)
        last = tuple(stop - 1 for _, stop in piece.box)
        kept = region[last].clone()
        region[last] += 1
        assert differing() == [piece.canonical], piece
        region[last] = kept
    assert differing() == []


def local_tensors(pieces: list[Piece], full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a rank that hold these pieces, filled from the whole weights."""
    tensors = {name: torch.zeros(shape).npu() for name, shape in local_shapes(pieces).items()}
    for piece in pieces:
        if piece.canonical != PADDING:
            piece.locate(tensors).copy_(full[piece.canonical][tuple(slice(*interval) for interval in piece.box)])
    return tensors
