"""A critic uses its own settings, optimizer and chunks, even if the actor's differ."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401
from omegaconf import OmegaConf

from post_training.finite_steps.weights import NonfiniteWeightsError
from tests.demonstrations.vllm_patches import module_with
from verl_patches.features import settings
from verl_patches.features.dynamic_batches import micro_batches
from verl_patches.features.exact_loss.update_loss import critics_mode
from verl_patches.features.learning_rate.rates import STEP
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.settings import OverlaySettings
from verl_patches.workers import megatron_workers
from verl_patches.workers.actor import megatron_actor
from verl_patches.workers.critic import megatron_critic

ACTORS = {"actor": {"loss_agg_mode": "token-mean", "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 64}}


@pytest.fixture(autouse=True)
def actors_settings(monkeypatch):
    """Activate a run's settings, which describe the actor."""
    monkeypatch.setattr(settings, "_current", OverlaySettings.from_config(ACTORS))


def test_critic_learns_at_its_own_rate():
    def optimizer():
        return SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": 0.0, "lr_mult": 0.5}])

    rates = {"warmup_style": "constant", "lr_warmup_steps": 4, "total_training_steps": 100}
    critic = SimpleNamespace(critic_optimizer=optimizer(), config=SimpleNamespace(optim=rates | {"lr": 4e-3}))
    output = SimpleNamespace(meta_info={"metrics": {}})
    data = SimpleNamespace(meta_info={STEP: 2})
    megatron_workers.update_critic_at_its_rate(lambda self, data: output, critic, data)
    first, second = (group["lr"] for group in critic.critic_optimizer.param_groups)
    assert 0 < first < 4e-3 and second == pytest.approx(first / 2)
    assert output.meta_info["metrics"] == {"critic/lr": first}


def test_critic_aggregates_by_its_own_mode():
    critic = SimpleNamespace(config=SimpleNamespace(loss_agg_mode="seq-mean-token-mean"))
    found = megatron_critic.forward_backward_batch(lambda self, data: critics_mode(), critic, None)
    assert found == "seq-mean-token-mean"


@pytest.mark.parametrize(("forward_only", "limit"), [(False, 96), (True, 128)])
def test_critic_cuts_by_its_own_limits(forward_only, limit):
    own = {"ppo_max_token_len_per_gpu": 96, "forward_max_token_len_per_gpu": 128, "use_dynamic_bsz": True}
    critic = SimpleNamespace(config=OmegaConf.create({"ppo_micro_batch_size_per_gpu": 1, **own}))
    seen = []
    megatron_critic.forward_backward_whole_batch(
        lambda self, data, **given: seen.append(list(micro_batches._limits)),
        critic,
        SimpleNamespace(batch=[1, 2, 3]),
        forward_only=forward_only,
    )
    assert seen == [[limit]] and critic.config.ppo_micro_batch_size_per_gpu == 1


@pytest.mark.parametrize(
    ("patch", "role"), [(megatron_critic.update_critic, "critic"), (megatron_actor.update_policy, "actor")]
)
def test_skipped_update_counts_for_its_role(lone_rank, own_context, patch, role):
    chunk = torch.nn.Linear(1, 1, device="npu")
    chunk.buffers = [SimpleNamespace(grad_data=torch.tensor([math.inf], device="npu"))]
    trained = SimpleNamespace(**{f"{role}_module": [chunk], f"{role}_optimizer": SimpleNamespace()})

    def update(self, dataloader):
        return {"grad_norm": getattr(self, f"{role}_optimizer").step()[1]}

    assert math.isnan(patch(update, trained, None)["grad_norm"])
    assert current_record().counts == {f"{role}/nonfinite_steps": 1}


def test_gradients_of_every_chunk_of_the_critic_are_reduced():
    """A virtual pipeline stage is a chunk; Megatron reduces its gradients with the function in its configuration."""
    chunks = [SimpleNamespace(config=SimpleNamespace(finalize_model_grads_func=None)) for _ in range(2)]
    critic = SimpleNamespace()
    with (
        module_with("megatron.core.distributed", finalize_model_grads="reduce"),
        module_with("megatron.core.utils", get_model_config=lambda chunk: chunk.config),
    ):
        megatron_critic.init(lambda self: setattr(self, "critic_module", chunks), critic)
    assert [chunk.config.finalize_model_grads_func for chunk in chunks] == ["reduce"] * 2


def test_bad_weights_of_any_chunk_of_the_critic_are_named(lone_rank):
    well, bad = (torch.nn.Linear(1, 1, device="npu") for _ in range(2))
    bad.weight.data.fill_(math.nan)
    worker = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(path="critics_folder")))
    with pytest.raises(NonfiniteWeightsError, match=r"the critic's weights .* \(critic\.model\.path=critics_folder\)"):
        megatron_workers.build_critic_of_finite_weights(lambda self: ([well, bad], None), worker)
