"""Values and gradients of grouped products match a loop over groups, also with some or all groups empty."""

import pytest
import torch

import verl_patches.prelude_patch  # noqa: F401


def by_loop(rows: torch.Tensor, weights: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])


@pytest.mark.parametrize("counts", [[3, 0, 1, 4], [0, 0, 0, 7], [1], [0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients_equal_a_loop(counts, dtype):
    """The reference computes in float32; sums of 16-bit products may be rounded once, at the end."""
    from post_training.models.megatron.grouped_experts import grouped_matmul

    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(counts), 6, generator=generator).to(dtype)
    weights = torch.randn(len(counts), 6, 5, generator=generator).to(dtype)
    upstream_gradient = torch.randn(sum(counts), 5, generator=generator).to(dtype)
    leaves = [tensor.clone().float().requires_grad_() for tensor in (rows, weights)]
    expected_result = by_loop(*leaves, counts)
    expected_result.backward(upstream_gradient.float())
    on_device = [tensor.npu().requires_grad_() for tensor in (rows, weights)]
    result = grouped_matmul(*on_device, torch.tensor(counts).npu())
    result.backward(upstream_gradient.npu())
    torch.testing.assert_close(result.cpu(), expected_result.to(dtype))
    for expected, found in zip(leaves, on_device, strict=True):
        assert found.grad.dtype == dtype
        torch.testing.assert_close(found.grad.cpu(), expected.grad.to(dtype))


def test_the_device_would_reject_to_split_the_rows_of_a_plain_grouped_product():
    """Show why the weights' gradient does not use it: torch_npu 2.5.1 rejects the call before any kernel runs."""
    import torch_npu

    rows, gradient = (torch.ones(4, size, dtype=torch.bfloat16, device="npu") for size in (6, 5))
    counts = torch.tensor([1, 3], device="npu")
    with pytest.raises(RuntimeError, match="group_type currently only support -1 and 0, current value is 2"):
        torch_npu.npu_grouped_matmul(
            [rows.t()], [gradient], group_list=counts, split_item=3, group_type=2, group_list_type=1
        )
