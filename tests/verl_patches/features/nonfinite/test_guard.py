import math

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.finite_steps import finite
from post_training.finite_steps.guard import NonfiniteGuard, any_nonfinite
from post_training.finite_steps.weights import nonfinite_weights


class Optimizer:
    """Counts its steps; it has the Megatron methods that decide about a step."""

    param_groups = [{"lr": 0.5}]

    def __init__(self, norm=2.0):
        self.steps, self._norm = 0, norm

    def get_grad_norm(self):
        return self._norm

    def clip_grad_norm(self, most):
        return self._norm

    def step_with_ready_grads(self):
        self.steps += 1
        return True

    def step(self):
        norm = self.clip_grad_norm(1.0)
        return self.step_with_ready_grads(), norm, None


class OtherOptimizer(Optimizer):
    """Steps in its own way, without `step_with_ready_grads`."""

    def step(self):
        self.steps += 1
        return True, self._norm, None


class UnclippedOptimizer(Optimizer):
    """With `clip_grad=0`, an optimizer outside a chain computes no norm and reports none."""

    def step(self):
        return self.step_with_ready_grads(), None, None


@pytest.mark.parametrize("norm", [2.0, math.inf, math.nan])
def test_norm_without_clipping_is_that_of_the_gradients(lone_rank, norm):
    optimizer = UnclippedOptimizer(norm)
    successful, found, _ = NonfiniteGuard(optimizer, lambda: [torch.ones(10).npu()]).step()
    assert successful and optimizer.steps == int(math.isfinite(norm))
    assert found == norm or math.isnan(found) and math.isnan(norm)


class Chain:
    """Steps its optimizers as Megatron's ChainedOptimizer does; without `clips`, nobody asks for their norms."""

    def __init__(self, norms, clips=True):
        self.chained_optimizers, self._clips = [Optimizer(norm) for norm in norms], clips

    def step_with_ready_grads(self):
        return all([part.step_with_ready_grads() for part in self.chained_optimizers])

    def step(self):
        norms = [part.get_grad_norm() for part in self.chained_optimizers] if self._clips else []
        norm = math.sqrt(sum(norm**2 for norm in norms)) if norms else None
        return self.step_with_ready_grads(), norm, None


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("norms", [(3.0, 4.0), (1.0, math.inf), (math.inf, 1.0), (1.0, math.nan), (math.nan, 1.0)])
def test_norm_of_a_chain_is_that_of_all_its_gradients(lone_rank, norms, clips):
    chain = Chain(norms, clips)
    guard = NonfiniteGuard(chain, lambda: [torch.ones(10).npu()])
    successful, norm, _ = guard.step()
    expected = torch.tensor(norms).norm().item()
    assert successful and (norm == expected or math.isnan(norm) and math.isnan(expected))
    is_finite = math.isfinite(expected)
    assert [part.steps for part in chain.chained_optimizers] == [int(is_finite)] * 2
    assert guard.skipped == int(not is_finite)


class ChainThatTakesOneNorm(Chain):
    """Behaves as in Megatron-core 0.16, which clips by an infinite norm before anything else asks for one."""

    def get_grad_norm(self):
        return math.sqrt(sum(part._norm * part._norm for part in self.chained_optimizers))

    def step(self):
        norm = self.get_grad_norm()
        for part in self.chained_optimizers:
            part._norm = part._norm * (1.0 / norm)  # clipped: 0 where the norm is inf
        return self.step_with_ready_grads(), norm, None


@pytest.mark.parametrize("norms", [(3.0, 4.0), (1e200, 1.0), (1.0, math.nan)])
def test_norm_that_the_chain_itself_takes_decides(lone_rank, norms):
    chain = ChainThatTakesOneNorm(norms)
    guard = NonfiniteGuard(chain, lambda: [torch.ones(10).npu()])
    successful, norm, _ = guard.step()
    is_finite = norms == (3.0, 4.0)
    assert successful and math.isfinite(norm) == is_finite and (norm == 5.0 or not is_finite)
    assert ([part.steps for part in chain.chained_optimizers], guard.skipped) == ([int(is_finite)] * 2, not is_finite)


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


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_nonfinite_norm_skips_step(lone_rank, norm):
    optimizer = Optimizer(norm)
    guard = NonfiniteGuard(optimizer, lambda: [torch.ones(10).npu()])
    successful, found, _ = guard.step()
    assert successful and not math.isfinite(found) and (optimizer.steps, guard.skipped) == (0, 1)
    assert not vars(optimizer).keys() & {"get_grad_norm", "clip_grad_norm", "step_with_ready_grads"}


def test_nonfinite_norm_of_another_rank_skips_step(lone_rank, monkeypatch):
    """The first reduction is over elements, which are finite everywhere; the second is over norms."""
    upstream, calls = torch.distributed.all_reduce, []

    def with_another_rank(flag, *args, **options):
        calls.append(flag.item())
        upstream(flag, *args, **options)
        if len(calls) == 2:
            flag.fill_(1)

    monkeypatch.setattr(torch.distributed, "all_reduce", with_another_rank)
    optimizer = Optimizer()
    guard = NonfiniteGuard(optimizer, lambda: [torch.ones(10).npu()])
    assert guard.step() == (True, 2.0, None)
    assert calls == [0, 0] and (optimizer.steps, guard.skipped) == (0, 1)


def test_step_that_cannot_be_skipped_raises(lone_rank):
    guard = NonfiniteGuard(OtherOptimizer(math.inf), list)
    with pytest.raises(RuntimeError, match="OtherOptimizer stepped with a gradient norm of inf"):
        guard.step()
    assert NonfiniteGuard(OtherOptimizer(), list).step() == (True, 2.0, None)


def test_everything_else_is_the_optimizers():
    assert NonfiniteGuard(Optimizer(), list).param_groups == [{"lr": 0.5}]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_every_part_of_large_gradient_checked(lone_rank, monkeypatch, bad):
    """30 elements are checked in parts of 8, in the shapes that gradients and weights have."""
    monkeypatch.setattr(finite, "CHECKED_ELEMENTS", 8)
    for where in range(30):
        for shape in ((30,), (3, 10), (15, 2)):
            gradient = torch.ones(30).npu()
            assert not any_nonfinite([gradient.view(shape)])
            gradient[where] = bad
            assert any_nonfinite([gradient.view(shape)]) and any_nonfinite([gradient.view(shape).t()])


def test_device_without_nan_in_maxima_is_no_matter(lone_rank, monkeypatch):
    """CANN documents for no maximum that it propagates NaN."""

    def ignoring_nan(tensor):
        return torch.where(tensor.isnan(), 0.0, tensor).sum().mul(0)

    for name in ("max", "min", "amax", "amin"):
        monkeypatch.setattr(torch.Tensor, name, ignoring_nan)
    assert any_nonfinite([torch.tensor([1.0, float("nan")]).npu()])
    assert nonfinite_weights([torch.nn.Linear(1, 1).npu().requires_grad_(False).apply(_spoilt)]) == ["weight", "bias"]


def _spoilt(module):
    for parameter in module.parameters():
        parameter.fill_(float("nan"))


def test_large_finite_values_are_finite(lone_rank):
    largest = torch.finfo(torch.float32).max
    assert not any_nonfinite(
        [torch.full((10,), largest).npu(), torch.full((10,), -largest).npu(), torch.empty(0).npu()]
    )
    assert not any_nonfinite([])
    assert any_nonfinite([torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16).npu()])
