"""The comparison of weights bit for bit, on one rank; across ranks it is in test_exchange.py."""

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.layouts.layout import Piece
from verl_patches.features.reshard.exchange import Side
from verl_patches.features.reshard.verification import differing_tensors

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
