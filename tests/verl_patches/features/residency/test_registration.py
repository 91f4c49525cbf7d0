from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.reshard.generation import WeightsGeneration, WeightsNotWholeError
from verl_patches.features.residency import registration
from verl_patches.features.residency.phases import Residency


@pytest.fixture
def generation(monkeypatch):
    made = WeightsGeneration()
    monkeypatch.setattr(registration, "process_generation", lambda: made)
    return made


def runner():
    """Return a runner with a model of two weights and a derived buffer, and a KV cache."""
    model = torch.nn.BatchNorm1d(64, dtype=torch.float32).npu()
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.running_mean.fill_(7.0)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    return SimpleNamespace(
        get_model=lambda: model, vllm_config=config, kv_caches=[], initialize_kv_cache=lambda _: None,
        overlay_kv_cache_config=None,
    )  # fmt: skip


def registered(rewritten):
    residency, made = Residency(lambda: True), runner()
    model = made.get_model()
    registration.register_rollout(residency, made, [model.weight] if rewritten else [])
    return residency, model


def test_rewritten_weights_leave_without_a_copy_and_nobody_generates_before_a_reshard(generation):
    residency, model = registered(rewritten=True)
    residency.enter("update")
    assert model.weight.untyped_storage().nbytes() == 0
    residency.enter("reshard")
    with pytest.raises(WeightsNotWholeError):
        generation.require_whole()
    with generation.writing(), torch.no_grad():
        model.weight.fill_(4.0)
    residency.enter("rollout")
    generation.require_whole()
    assert model.weight.eq(4.0).all() and model.running_mean.eq(7.0).all()


def test_host_memory_holds_only_what_no_reshard_writes(generation):
    copied = {}
    for rewritten in (True, False):
        residency, _ = registered(rewritten)
        residency.enter("update")
        groups = residency._groups["rollout_weights"]
        copied[rewritten] = sum(host.numel() for group in groups for host in group._host.values())
    assert copied[False] - copied[True] == 64 * 4 and copied[True] > 0


def test_generation_with_offloaded_initial_weights_rejected(generation):
    residency, _ = registered(rewritten=True)
    generation.require_whole()
    residency.enter("update")
    residency.enter("reshard")
    with pytest.raises(WeightsNotWholeError):
        generation.require_whole()


def test_weights_that_nobody_rewrites_come_back(generation):
    residency, model = registered(rewritten=False)
    for phase in ("update", "reshard", "rollout"):
        residency.enter(phase)
    generation.require_whole()
    assert model.weight.eq(3.0).all()


def test_gradients_leave_without_a_copy_and_come_back_as_zeros(monkeypatch):
    weight, gradient = torch.ones(64).npu(), torch.ones(64).npu()
    monkeypatch.setattr(registration, "parameter_tensors", lambda chunks: [weight])
    monkeypatch.setattr(registration, "gradient_tensors", lambda chunks: [gradient])
    residency = Residency(lambda: True)
    registration.register_actor(residency, [], None)
    residency.enter("ref")
    held = {name: sum(len(group._host) for group in groups) for name, groups in residency._groups.items()}
    assert (held["actor_params"], held["actor_grads"]) == (1, 0)
    residency.enter("update")
    assert weight.eq(1).all() and gradient.eq(0).all()
