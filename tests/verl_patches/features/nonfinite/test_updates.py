"""An update behind the guard is skipped and counted; after that alone, weights that are not finite end the run."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401

from verl_patches.features.measure.step_record import current_record, finish_step
from verl_patches.features.nonfinite.updates import guarded
from verl_patches.features.nonfinite.weights import NonfiniteWeightsError


@pytest.fixture(autouse=True)
def own_step(lone_rank):
    finish_step()
    yield
    finish_step()


class Optimizer:
    """Of Megatron's methods it has those by which a step is decided."""

    def get_grad_norm(self):
        return 2.0

    def clip_grad_norm(self, most):
        return 2.0

    def step_with_ready_grads(self):
        return True

    def step(self):
        return self.step_with_ready_grads(), 2.0, None


def trained(gradient, weight):
    """An actor of one chunk whose flat gradient is `gradient`, and which has one weight."""
    chunk = torch.nn.Linear(1, 1, bias=False, device="npu")
    chunk.weight.data.fill_(weight)
    chunk.buffers = [SimpleNamespace(grad_data=torch.tensor([gradient], device="npu"))]
    return SimpleNamespace(actor_module=[chunk], actor_optimizer=Optimizer())


def update(actor):
    return {"grad_norm": actor.actor_optimizer.step()[1]}


@pytest.mark.parametrize(("gradient", "norm", "skipped"), [(1.0, 2.0, 0), (math.inf, math.nan, 1)])
def test_an_update_of_bad_gradients_is_skipped_and_counted(gradient, norm, skipped):
    actor = trained(gradient, 1.0)
    own = actor.actor_optimizer
    found = guarded(actor, "actor", lambda: update(actor))["grad_norm"]
    assert found == norm or math.isnan(found) and math.isnan(norm)
    assert current_record().counts == {"actor/nonfinite_steps": skipped} and actor.actor_optimizer is own


def test_weights_are_looked_at_after_an_update_that_was_skipped_and_only_then():
    bad = trained(math.nan, math.inf)
    with pytest.raises(NonfiniteWeightsError, match="after an update that was skipped, the actor's weights hold inf"):
        guarded(bad, "actor", lambda: update(bad))
    well = trained(1.0, math.inf)
    assert guarded(well, "actor", lambda: update(well)) == {"grad_norm": 2.0}


def test_the_optimizer_comes_back_from_an_update_that_fails():
    actor = trained(1.0, 1.0)
    own = actor.actor_optimizer

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        guarded(actor, "actor", fails)
    assert actor.actor_optimizer is own
