"""Unpadding and padding give the same result as a loop over sequences."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.features.compatibility.unpadding import pad_input, unpad_input


@settings(max_examples=40)
@given(
    mask=st.integers(1, 7).flatmap(
        lambda length: st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=4)
    )
)
def test_round_trip_equals_a_loop(mask):
    mask = torch.tensor(mask)
    batch, length = mask.shape
    values = torch.randn(batch, length, 3, requires_grad=True)
    kept, indices, bounds, longest, used = unpad_input(values, mask.long())
    expected = torch.cat([values[row][mask[row]] for row in range(batch)])
    lengths = [int(mask[row].sum()) for row in range(batch)]
    assert torch.equal(kept, expected)
    assert bounds.tolist() == [sum(lengths[:row]) for row in range(batch + 1)] and bounds.dtype is torch.int32
    assert (longest, used.tolist()) == (max(lengths), lengths)
    padded = pad_input(kept, indices, batch, length)
    assert torch.equal(padded, values * mask.unsqueeze(-1))
    padded.sum().backward()
    assert torch.equal(values.grad, mask.unsqueeze(-1).expand_as(values).float())


def test_unused_positions_are_kept_but_not_counted_as_used():
    mask, unused = torch.tensor([[1, 0, 0]]), torch.tensor([[0, 1, 0]])
    kept, _, bounds, _, used = unpad_input(torch.arange(3.0).view(1, 3, 1), mask, unused)
    assert kept.flatten().tolist() == [0.0, 1.0] and bounds.tolist() == [0, 2] and used.tolist() == [1]
