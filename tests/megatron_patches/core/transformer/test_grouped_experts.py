"""Grouped products against a loop over groups, values and gradients, with empty groups and with none filled."""

import pytest
import torch

import verl_patches.prelude_patch  # noqa: F401


def by_loop(rows: torch.Tensor, weights: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])


@pytest.mark.parametrize("counts", [[3, 0, 1, 4], [0, 0, 0, 7], [1], [0, 0]], ids=str)
def test_values_and_gradients_equal_a_loop(counts):
    from megatron_patches.core.transformer.moe.grouped_experts import grouped_matmul

    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(counts), 6, generator=generator)
    weights = torch.randn(len(counts), 6, 5, generator=generator)
    upstream_gradient = torch.randn(sum(counts), 5, generator=generator)
    leaves = [tensor.clone().requires_grad_() for tensor in (rows, weights)]
    by_loop(*leaves, counts).backward(upstream_gradient)
    on_device = [tensor.npu().requires_grad_() for tensor in (rows, weights)]
    result = grouped_matmul(*on_device, torch.tensor(counts).npu())
    result.backward(upstream_gradient.npu())
    torch.testing.assert_close(result.cpu(), by_loop(rows, weights, counts))
    for expected, found in zip(leaves, on_device, strict=True):
        torch.testing.assert_close(found.grad.cpu(), expected.grad)
