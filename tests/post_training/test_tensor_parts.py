"""Operations on tensors in parts, compared with the same operations on whole tensors."""

import pytest
import torch
import torch_npu  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from post_training import tensor_parts
from post_training.tensor_parts import copy_in_parts, host_copy, parts_of, zero_in_parts
from tests.large_operations import LargestOperation

SMALL = 64


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(tensor_parts, "PART_ELEMENTS", SMALL)


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 40), st.booleans())
def test_parts_cover_tensor_in_order(shape, most, turned):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    tensor = tensor.transpose(0, -1) if turned and shape else tensor
    parts = list(parts_of(tensor, most))
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
    assert all(part.numel() <= most for part in parts)
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)


def test_parts_of_deepseek_gradients_stay_below_2_to_the_30():
    """Check the gradients of 8 expert layers on one die, as floats and as the bytes zeroed by residency."""
    for tensor in (torch.empty(2_818_572_288, device="meta"), torch.empty(4 * 2_818_572_288, device="meta")):
        sizes = [part.numel() for part in parts_of(tensor)]
        assert sum(sizes) == tensor.numel() and max(sizes) < 2**30


@pytest.mark.parametrize("target, source", [((3,), (1,)), ((2, 3), (3, 2)), ((2, 3), (6,)), ((2, 3), (3,)), ((), (1,))])
def test_copy_of_other_shape_rejected(target, source):
    """torch itself would broadcast a row to all rows."""
    kept = torch.zeros(target)
    with pytest.raises(ValueError) as raised:
        copy_in_parts(kept, torch.ones(source))
    assert str(raised.value) == f"a copy of shape {source} does not fit a tensor of {target}" and not kept.any()


@pytest.mark.parametrize("turned", [False, True])
def test_copies_and_zeros_in_parts_equal_the_whole(small_parts, turned):
    source = torch.randn(20, 30).npu()
    source, target = (source.t(), torch.empty(30, 20).npu()) if turned else (source, torch.empty(20, 30).npu())
    with LargestOperation() as largest:
        copy_in_parts(target, source)
        copied = host_copy(source)
    assert largest.elements <= SMALL
    assert torch.equal(target.cpu(), source.cpu()) and torch.equal(copied, source.cpu())
    with LargestOperation() as largest:
        zero_in_parts(target)
    assert largest.elements <= SMALL and not target.any()
