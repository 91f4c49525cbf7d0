"""verl's Megatron critic worker on two and four dies: its device memory by phase, a resume, and skipped updates."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from post_training.plan.device import _engine_buffers, device_memory
from post_training.plan.job import read_job
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.forked import MEGATRON
from tests.ranks import run_ranks
from tests.worker_processes.conftest import DATA, random_checkpoint
from tests.worker_processes.processes import VENDOR_ENVIRONMENT
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

pytestmark = pytest.mark.slow
PROGRAM = "tests.verl_patches.workers.critic_program"


_MEGATRON = "actor_rollout_ref.actor.megatron"
TP2 = (
    2,
    (f"{_MEGATRON}.pipeline_model_parallel_size=1", f"{_MEGATRON}.override_transformer_config.num_layer_list=[3]"),
)
TP2_PP2 = pytest.param((4, ()), marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=[TP2, TP2_PP2], ids=["TP2", "TP2 PP2"])
def trained(request, tmp_path_factory):
    dies, layout = request.param
    folder = tmp_path_factory.mktemp("critic")
    checkpoint = random_checkpoint(folder)
    overrides = [
        f"actor_rollout_ref.model.path={checkpoint}", "algorithm.adv_estimator=gae", "data.train_batch_size=4",
        "actor_rollout_ref.overlay.sample_handles.enabled=false",
        "data.max_response_length=8", "actor_rollout_ref.rollout.n=2", "critic.optim.lr=1e-3",
        "critic.ppo_micro_batch_size_per_gpu=4", "critic.optim.warmup_style=linear", "+critic.optim.lr_warmup_steps=1",
        "critic.optim.total_training_steps=10", "actor_rollout_ref.overlay.precision=float32",
        "actor_rollout_ref.overlay.mindspeed.engine=off", *layout,
    ]  # fmt: skip
    (folder / "request.json").write_text(json.dumps({"overrides": overrides, "resumes": True}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (VENDOR_ENVIRONMENT | {"LOCAL_WORLD_SIZE": str(dies)}).items():
            patch.setenv(name, value)
        run_ranks(PROGRAM, dies, folder, 500, imported=MEGATRON)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(dies)]
    return SimpleNamespace(folder=folder, ranks=ranks, checkpoint=checkpoint)


def test_the_critic_learns_at_the_rate_of_each_step(trained):
    first, second = (step["metrics"] for step in trained.ranks[-1]["first"])
    assert first["critic/lr"] == 0 and second["critic/lr"] > 0
    assert all(math.isfinite(step["critic/vf_loss"][0]) for step in (first, second))
    values = [[step["values"] for step in rank["unbroken"]] for rank in trained.ranks]
    assert values[1:] == values[:-1], "every rank has the values of the last stage"
    assert first["critic/grad_norm"][0] > 0


def test_the_critic_is_on_the_device_in_its_phases_alone(trained):
    for rank in trained.ranks:
        found = rank["resident"]
        assert found["values"] - found["ref"] == found["weights"] > 1 << 16
        assert found["update_critic"] - found["ref"] == found["whole"]
        assert found["whole"] > 3 * found["weights"]


def test_two_steps_after_a_resume_are_those_of_the_unbroken_run(trained):
    for rank in trained.ranks:
        assert rank["resumed"] == rank["unbroken"]
        assert rank["not_resumed"] != rank["unbroken"][0], "the steps depend on where they begin"
        assert not rank["saved_at_once"], "it is written while training goes on"


def test_an_update_that_is_not_finite_changes_no_bit(trained):
    assert all(rank["skipped"] and rank["skipped_count"] == 1 for rank in trained.ranks)


def test_every_element_of_the_critic_is_stored_once_by_huggingface_name(trained):
    names: dict[str, int] = {}
    for file in sorted((trained.folder / "critic").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():
                state, _, rest = key.partition("/")
                if state == "master":
                    name = rest.partition("[")[0]
                    names[name] = names.get(name, 0) + opened.get_tensor(key).numel()
    with safe_open(next(trained.checkpoint.glob("*.safetensors")), "pt") as actors:
        expected = {name: torch.Size(actors.get_slice(name).get_shape()).numel() for name in actors.keys()}
        (hidden,) = actors.get_slice("model.norm.weight").get_shape()
    expected = {name: size for name, size in expected.items() if not name.endswith(("lm_head.weight", "bias"))}
    assert names == expected | {"score.weight": hidden, "score.bias": 1}


# Layers whose weights are large compared with what a forward leaves.
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 32000}
ONE_DIE = (
    "algorithm.adv_estimator=gae", "actor_rollout_ref.overlay.sample_handles.enabled=false",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1", "trainer.n_gpus_per_node=1",
    "~actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list",
    "~actor_rollout_ref.actor.megatron.override_transformer_config.moe_tp_extend_ep",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.overlay.rollout.expert_parallel_size=1",
    "actor_rollout_ref.overlay.mindspeed.engine=off", "data.max_prompt_length=64", "data.max_response_length=64",
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "critic.ppo_micro_batch_size_per_gpu=4",
)  # fmt: skip


@pytest.mark.exhaustive
def test_the_plan_is_what_the_meters_of_a_die_say(monkeypatch, tmp_path):
    request = CheckpointRequest(DATA, 0, "bfloat16", model_type="qwen2", warm_start=None, changes=tuple(SIZES.items()))
    make_checkpoint(request, tmp_path / "model", lambda step, loss: None)
    overrides = [*ONE_DIE, f"actor_rollout_ref.model.path={tmp_path}/model"]
    (tmp_path / "request.json").write_text(json.dumps({"overrides": overrides, "resumes": False}))
    for name, value in (VENDOR_ENVIRONMENT | {"LOCAL_WORLD_SIZE": "1", "NPU_EMULATOR_CAPACITY_MB": "4096"}).items():
        monkeypatch.setenv(name, value)
    run_ranks(PROGRAM, 1, tmp_path, 900, imported=MEGATRON)
    found = json.loads((tmp_path / "rank0.json").read_text())
    peaks = found["peaks"]
    model = json.loads((tmp_path / "model" / "config.json").read_text())
    job = read_job(resolved(compose("rehearsal", overrides)), model)
    memory = device_memory(job, 4 << 30, 0)
    # There is no engine; the attention mask exists without the critic too.
    beside = found["resident"]["ref"] - _engine_buffers(job)
    ratios = {phase: (memory.phases[phase] + beside) / peaks[phase] for phase in ("values", "update_critic")}
    print(ratios)
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios.values()), ratios
    # Control: without Adam's state, the plan would be off by more than that.
    assert memory.critic_optimizer > 0.1 * peaks["update_critic"]
