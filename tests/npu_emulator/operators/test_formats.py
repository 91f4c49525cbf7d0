"""Formats of memory: which one a tensor remembers, and who shares it."""

import pytest
import torch
import torch_npu
from torch_npu import Format


@pytest.fixture
def private_formats():
    torch_npu.npu.config.allow_internal_format = True
    yield
    torch_npu.npu.config.allow_internal_format = False


@pytest.mark.parametrize(
    ("shape", "plain"), [((), 2), ((3,), 2), ((2, 3), 2), ((2, 3, 4, 5), 0), ((1, 1, 1, 1, 1), 30)]
)
def test_new_tensors_have_the_plain_format_of_their_dimensions(shape, plain):
    assert torch_npu.get_npu_format(torch.ones(shape, device="npu")) == plain


def test_a_cast_keeps_numbers_and_remembers_the_format(private_formats):
    x = torch.randn(2, 3, 4, 5, device="npu")
    cast = torch_npu.npu_format_cast(x, 29)
    assert torch.equal(cast, x) and cast.data_ptr() != x.data_ptr()
    assert torch_npu.get_npu_format(cast) == Format.FRACTAL_NZ == 29 and torch_npu.get_npu_format(x) == 0
    assert torch.ops.npu.get_npu_format(cast) == 29
    assert torch_npu.get_npu_format(torch.ops.npu.npu_format_cast(x, 29)) == 29
    back = torch_npu.npu_format_cast(cast, 0)
    assert torch_npu.get_npu_format(back) == 0 and back.data_ptr() != cast.data_ptr()


def test_the_format_belongs_to_the_memory(private_formats):
    cast = torch_npu.npu_format_cast(torch.randn(4, 6, device="npu"), 29)
    holder = torch.nn.Parameter(torch.zeros(4, 6, device="npu"))
    holder.data = cast
    for shared in (cast.view(24), cast.t(), cast[1:], holder, holder.data):
        assert torch_npu.get_npu_format(shared) == 29
    for own in (cast + 1, cast.clone(), cast.cpu().to("npu"), torch.empty_like(cast)):
        assert torch_npu.get_npu_format(own) == 2
    x = torch.ones(4, 6, device="npu")
    view = x.view(24)
    assert torch_npu.npu_format_cast_(x, 29) is x and torch_npu.get_npu_format(view) == 29


def test_a_format_does_not_outlive_its_memory(private_formats):
    for _ in range(20):
        torch_npu.npu_format_cast(torch.randn(4, 6, device="npu"), 29)
        assert torch_npu.get_npu_format(torch.empty(4, 6, device="npu")) == 2


def test_plain_formats_share_memory():
    x = torch.randn(2, 3, 4, 5, device="npu")
    same, other = torch_npu.npu_format_cast(x, 0), torch_npu.npu_format_cast(x, 2)
    assert same.data_ptr() == other.data_ptr() == x.data_ptr()
    assert torch_npu.get_npu_format(x) == 2
    flat = torch_npu.npu_format_cast_(torch.ones(3, device="npu"), Format.NCHW)
    assert torch_npu.get_npu_format(flat) == Format.NCHW


def test_private_formats_are_refused_unless_allowed():
    """The default of Atlas A3."""
    x = torch.randn(4, 6, device="npu")
    with pytest.warns(UserWarning, match="allow_internal_format"):
        cast = torch_npu.npu_format_cast(x, 29)
    assert torch.equal(cast, x) and torch_npu.get_npu_format(cast) == 2
    with pytest.warns(UserWarning, match="allow_internal_format"):
        assert torch_npu.get_npu_format(torch_npu.npu_format_cast_(x, 29)) == 2
    with pytest.raises(RuntimeError, match="npu_format_cast: 77 is not a format"):
        torch_npu.npu_format_cast(x, 77)


def test_gradients_pass(private_formats):
    x = torch.randn(4, 6, device="npu", requires_grad=True)
    (torch_npu.npu_format_cast(x, 29) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_reading_ahead_is_without_effect():
    torch_npu.npu_prefetch(torch.ones(4, device="npu"), None, 1024)
