"""The comparison of weights bit for bit, on one rank; across ranks it is in test_exchange.py."""

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.layouts.layout import PADDING, LocalView, Piece
from verl_patches.features.reshard.exchange import Side
from verl_patches.features.reshard.verification import _equal_where_both, differing_tensors

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
