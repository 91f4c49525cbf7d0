import math

import pytest
import torch
import torch_npu  # noqa: F401

from verl_patches.features.nonfinite.guard import NonfiniteGuard, any_nonfinite


class Optimizer:
    """Counts its steps."""

    param_groups = [{"lr": 0.5}]

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1
        return True, 2.0, None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 500, 999])
def test_one_bad_value_anywhere_skips_the_step(lone_rank, bad, where):
    gradients = [torch.ones(10).npu(), torch.ones(1000).npu()]
    optimizer = Optimizer()
    guard = NonfiniteGuard(optimizer, lambda: gradients)
    assert guard.step() == (True, 2.0, None)
    gradients[1][where] = bad
    successful, norm, _ = guard.step()
    assert successful and math.isnan(norm)
    assert (optimizer.steps, guard.skipped) == (1, 1)


def test_everything_else_is_the_optimizers():
    assert NonfiniteGuard(Optimizer(), list).param_groups == [{"lr": 0.5}]


def test_large_finite_values_are_finite(lone_rank):
    largest = torch.finfo(torch.float32).max
    assert not any_nonfinite(
        [torch.full((10,), largest).npu(), torch.full((10,), -largest).npu(), torch.empty(0).npu()]
    )
    assert not any_nonfinite([])
    assert any_nonfinite([torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16).npu()])
