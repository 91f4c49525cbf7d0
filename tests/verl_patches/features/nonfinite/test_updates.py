"""A guarded bad update is skipped and counted; only after a skipped update do non-finite weights end the run."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.finite_steps.weights import NonfiniteWeightsError
from verl_patches.features.measure.step_record import current_record, finish_step
from verl_patches.features.nonfinite.updates import guarded


@pytest.fixture(autouse=True)
def own_step(lone_rank):
    finish_step()
    yield
    finish_step()


class Optimizer:
    """An optimizer with the Megatron methods that decide about a step."""

    def get_grad_norm(self):
        return 2.0

    def clip_grad_norm(self, most):
        return 2.0

    def step_with_ready_grads(self):
        return True

    def step(self):
        return self.step_with_ready_grads(), 2.0, None


def trained(gradient, weight, role="actor"):
    """Return an actor or critic of one chunk with the flat gradient `gradient` and one weight."""
    chunk = torch.nn.Linear(1, 1, bias=False, device="npu")
    chunk.weight.data.fill_(weight)
    chunk.buffers = [SimpleNamespace(grad_data=torch.tensor([gradient], device="npu"))]
    return SimpleNamespace(**{f"{role}_module": [chunk], f"{role}_optimizer": Optimizer()})


def update(trained, role="actor"):
    return {"grad_norm": getattr(trained, f"{role}_optimizer").step()[1]}


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("gradient", "norm", "skipped"), [(1.0, 2.0, 0), (math.inf, math.nan, 1)])
def test_an_update_of_bad_gradients_is_skipped_and_counted(gradient, norm, skipped, role):
    model = trained(gradient, 1.0, role)
    own = getattr(model, f"{role}_optimizer")
    found = guarded(model, role, lambda: update(model, role))["grad_norm"]
    assert found == norm or math.isnan(found) and math.isnan(norm)
    assert current_record().counts == {f"{role}/nonfinite_steps": skipped}
    assert getattr(model, f"{role}_optimizer") is own


def test_actor_and_critic_of_a_step_count_apart():
    """One step of PPO trains both, in one process."""
    actor, critic = trained(1.0, 1.0), trained(math.nan, 1.0, "critic")
    for _ in range(2):
        guarded(critic, "critic", lambda: update(critic, "critic"))
        guarded(actor, "actor", lambda: update(actor))
    assert current_record().counts == {"actor/nonfinite_steps": 0, "critic/nonfinite_steps": 2}


def test_bad_gradient_of_any_chunk_skips():
    """A virtual pipeline stage is its own chunk, and experts have their own buffers."""
    for chunk in range(2):
        for experts in (False, True):
            model = trained(1.0, 1.0)
            model.actor_module += trained(1.0, 1.0).actor_module
            bad = [SimpleNamespace(grad_data=torch.tensor([math.inf], device="npu"))]
            setattr(model.actor_module[chunk], "expert_parallel_buffers" if experts else "buffers", bad)
            guarded(model, "actor", functools.partial(update, model))
    assert current_record().counts == {"actor/nonfinite_steps": 4}


def test_weights_are_looked_at_after_an_update_that_was_skipped_and_only_then():
    bad = trained(math.nan, math.inf)
    with pytest.raises(NonfiniteWeightsError, match="after a skipped update, the actor's weights contain inf"):
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
