"""Division of integers in place, which CANN accepts and torch on the host rejects."""

import pytest
import torch


@pytest.mark.parametrize("divisor", [2, torch.tensor([2, 2, 4], dtype=torch.int32)], ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_integers_are_divided_in_place_and_truncated(divisor, dtype):
    x = torch.tensor([7, -7, 9], dtype=dtype, device="npu")
    x.div_(divisor.to("npu") if isinstance(divisor, torch.Tensor) else divisor)
    assert x.dtype == dtype and x.tolist() == [3, -3, 9 // (2 if isinstance(divisor, int) else 4)]
    with pytest.raises(RuntimeError, match="can't be cast"):
        x.cpu().div_(2)


def test_other_operators_still_reject_a_result_of_another_type():
    """The control: for them the kernel checks the type of the result."""
    x = torch.tensor([7, -7, 9], dtype=torch.int32, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(torch.npu.SyncLaunchStream()), pytest.raises(RuntimeError, match="can't be cast"):
        x.mul_(0.5)
