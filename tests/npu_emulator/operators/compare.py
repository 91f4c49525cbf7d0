"""Compares an operator and its gradients on the NPU with a reference on the CPU in float64, and checks rejections."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


def gradients(function: Callable, inputs: Sequence[Tensor], seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Return the output of `function` and the gradients of a random weighting of it, on the host."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (output * weights.to(output)).sum().backward()
    return output.detach().cpu(), [leaf.grad.cpu() for leaf in leaves]


def assert_like_reference(operator: Callable, reference: Callable, inputs: Sequence[Tensor], tolerance: float = 1e-5):
    """Check that output and every gradient of the operator on the NPU equal those of the reference in float64."""
    output, found = gradients(operator, [tensor.to("npu") for tensor in inputs])
    expected_output, expected = gradients(reference, [tensor.double() for tensor in inputs])
    for got, wanted in zip([output, *found], [expected_output, *expected], strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Check that the operator called inside is rejected with these words.

    It runs on a stream without a queue, which a rejection would leave broken. Not for an operator that also works on
    another stream, as attention for training does.
    """
    torch.npu.synchronize()
    with torch.npu.stream(torch.npu.SyncLaunchStream()), pytest.raises(RuntimeError, match=words):
        yield
