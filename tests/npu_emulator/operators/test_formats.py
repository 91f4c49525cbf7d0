"""Formats of memory where private ones are not allowed, which is the default of Atlas A3."""

import pytest
import torch
import torch_npu


@pytest.fixture
def plain_formats_alone():
    """Restore the default: importing vLLM-Ascend's model runner allows other formats in the whole process."""
    earlier = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
    torch.npu.config.allow_internal_format = False
    yield
    torch.npu.config.allow_internal_format = earlier == b"enable"


def test_a_private_format_is_a_plain_one_unless_it_is_allowed(plain_formats_alone):
    """The control is the check `tiles` of the device program, where it is allowed, and memory lies in tiles."""
    x = torch.randn(4, 6, device="npu")
    for cast in (torch_npu.npu_format_cast(x, 29), torch_npu.npu_format_cast_(x.clone(), 29)):
        assert torch.equal(cast, x) and torch_npu.get_npu_format(cast) == 2


def test_reading_ahead_is_without_effect():
    x = torch.ones(4, device="npu")
    torch_npu.npu_prefetch(x, None, 1024)
    assert x.tolist() == [1] * 4
