"""A rehearsal of the stack 2026 only uses keys that verl's own configuration has."""

import sys
from itertools import product
from pathlib import Path

import pytest

from rehearsal.preflight import PreflightError
from rehearsal.stack_2026.__main__ import main, parse_arguments
from rehearsal.stack_2026.plan import (
    BACKENDS,
    CHANGES,
    HEARTBEATS,
    MODELS,
    PEAKS,
    ROUTING_REPLAY,
    TOOLS,
    Options,
    make_plan,
)
from rehearsal.stack_2026.stages import check_backend
from rehearsal.tiny_model.architecture import TINY_MODELS, reads_images
from verl_plugin.offload import LIBRARY as OFFLOAD
from verl_plugin.resume.checks import ENGINES
from verl_plugin.routing_replay.checks import ENGINES as REPLAY
from verl_plugin.trainer_modes import MODULES, MODULES_KEY

TEXT_MODELS = [model for model in MODELS if not reads_images(model)]
[IMAGE_MODEL] = set(MODELS) - set(TEXT_MODELS)


@pytest.mark.parametrize(("model", "backend"), [*product(TEXT_MODELS, BACKENDS), (IMAGE_MODEL, "fsdp2")])
def test_every_key_is_known_to_verl(tmp_path, monkeypatch, model, backend):
    from hydra import compose, initialize_config_module

    options = Options(model, backend, output=tmp_path)
    plan = make_plan(options, "now")
    given = [word for word in plan.overrides() if not word.startswith(("--config", "hydra."))]
    name = "ppo_trainer" if backend == "fsdp2" else "ppo_megatron_trainer"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(name, overrides=given)
    assert config.actor_rollout_ref.model.path == str(plan.checkpoint)
    assert config.actor_rollout_ref.actor.strategy == ("fsdp2" if backend == "fsdp2" else "megatron")
    if backend != "fsdp2":
        experts = 1 if model == "qwen3" else 4
        assert config.actor_rollout_ref.actor.megatron.expert_model_parallel_size == experts


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_keys_of_a_tool_are_known_to_verl(tmp_path, model):
    from hydra import compose, initialize_config_module

    plan = make_plan(Options(model, "fsdp2", tool="calculator", output=tmp_path), "now")
    given = [word for word in plan.overrides() if not word.startswith(("--config", "hydra."))]
    with initialize_config_module("verl.trainer.config", version_base=None):
        rollout = compose("ppo_trainer", overrides=given).actor_rollout_ref.rollout
    assert rollout.agent.default_agent_loop == "tool_agent"
    assert rollout.multi_turn.function_tool_path == str(TOOLS["calculator"]) and TOOLS["calculator"].is_file()
    assert rollout.max_model_len == 64 >= rollout.prompt_length + rollout.response_length
    assert "--calls-tool" in plan.checkpoint_command()
    without = make_plan(Options(model, "fsdp2", output=tmp_path), "now")
    assert "--calls-tool" not in without.checkpoint_command() and without.checkpoint != plan.checkpoint


@pytest.mark.parametrize(("model", "backend"), [("qwen3", "fsdp2"), ("qwen3_moe", "megatron")])
def test_keys_of_dies_that_only_generate_are_known_to_verl(tmp_path, model, backend):
    from hydra import compose, initialize_config_module

    plan = make_plan(Options(model, backend, dies=3, rollout_dies=1, output=tmp_path), "now")
    given = [word for word in plan.overrides() if not word.startswith(("--config", "hydra."))]
    name = "ppo_trainer" if backend == "fsdp2" else "ppo_megatron_trainer"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(name, overrides=given)
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.n_gpus_per_node) == (2, 1)
    assert config.trainer.v1.trainer_mode == "separate_async" and not config.actor_rollout_ref.hybrid_engine
    assert config.trainer.v1.sampler.custom_sampler.path is None
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size
    if backend == "megatron":
        assert config.actor_rollout_ref.actor.megatron.expert_model_parallel_size == 2
    assert plan.environment()["NPU_EMULATOR_DEVICES"] == "3"


def test_module_of_a_key_is_loaded_where_workers_are_forked(tmp_path):
    own = make_plan(Options(output=tmp_path), "now").environment()
    assert MODULES not in own
    plan = make_plan(Options(output=tmp_path, overrides=(f"++{MODULES_KEY}='one,other'",)), "now")
    assert plan.environment() == own | {MODULES: "one,other"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--dies", "2", "--rollout-dies", "2"], "--rollout-dies=2 is invalid: at least one of --dies 2 has to train"),
        (["--rollout-dies", "-1"], "--rollout-dies: '-1' is invalid. Set it to a whole number from 0"),
        (["--rollout-dies", "1", "--weights", "naive"], "--weights=naive is invalid: it does not reach other dies"),
        (["--rollout-dies", "1", "--job", "qwen3_0_6b_gsm8k_one_card"], "--rollout-dies=1 is invalid: --job has"),
    ],
)
def test_dies_that_cannot_only_generate_rejected(capsys, arguments, error):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "--backend=megatron is invalid: --model qwen2_5_vl reads images, and alltoallv has no layout"),
        (["--backend", "fsdp2", "--tool", "calculator"], "--tool=calculator is invalid: --model qwen2_5_vl reads"),
        (
            ["--backend", "fsdp2", "--data", "/file"],
            "--data=/file is invalid: --model qwen2_5_vl reads images, and its",
        ),
    ],
)
def test_options_not_rehearsed_with_images_rejected(capsys, arguments, error):
    with pytest.raises(SystemExit):
        parse_arguments(["--model", IMAGE_MODEL, *arguments])
    assert error in capsys.readouterr().err


def test_images_are_drawn_and_padded(tmp_path):
    plan = make_plan(Options(IMAGE_MODEL, "fsdp2", seed=3, output=tmp_path), "now")
    assert plan.data_command()[2:] == [
        "rehearsal.make_image_task",
        "--output_dir",
        str(tmp_path / "data"),
        "--seed",
        "3",
    ]
    assert "actor_rollout_ref.model.use_remove_padding=false" in plan.overrides()
    options, _ = parse_arguments(["--model", IMAGE_MODEL, "--backend", "fsdp2"])
    assert options.model == IMAGE_MODEL


def test_tool_beside_a_job_rejected(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--job", "qwen3_0_6b_gsm8k_one_card", "--tool", "calculator"])
    assert "--tool=calculator is invalid: --job has its own. Remove one of them" in capsys.readouterr().err


JOB = "qwen3_0_6b_gsm8k_one_card"


@pytest.mark.parametrize(
    ("arguments", "dies", "steps"),
    [
        ([], 1, 10),
        (["--dies", "4", "--steps", "25"], 4, 25),  # the values of the rehearsal's own job
        (["--", "trainer.n_gpus_per_node=4"], 4, 10),
        (["--dies", "2", "--", "trainer.n_gpus_per_node=4"], 4, 10),
    ],
)
def test_job_takes_the_dies_and_steps_that_are_given(arguments, dies, steps):
    options, _ = parse_arguments(["--job", JOB, *arguments])
    assert (options.dies, options.steps, options.precision) == (dies, steps, "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--dies", "0"], "--dies: '0' is invalid. Set it to a whole number from 1"),
        (["--steps", "x"], "--steps: 'x' is invalid. Set it to a whole number from 1"),
        (["--job", JOB, "--precision", "float32"], "--precision=float32 is invalid: --job has its own. Remove one"),
        (["--job", JOB, "--", "trainer.n_gpus_per_node=0"], "trainer.n_gpus_per_node='0' is invalid. Set it to a"),
    ],
)
def test_wrong_number_and_precision_beside_a_job_rejected(capsys, arguments, error):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert error in capsys.readouterr().err


def test_keys_of_the_user_decide_steps_and_checkpoint_folder(tmp_path):
    keys = ("++trainer.default_local_dir='/data/a=b'", "trainer.total_training_steps=3")
    plan = make_plan(Options(output=tmp_path, overrides=keys), "now")
    assert plan.checkpoints == Path("/data/a=b") and plan.steps == 3
    plan = make_plan(Options(output=tmp_path, steps=7), "now")
    assert plan.checkpoints == tmp_path / "checkpoints" and plan.steps == 7


def test_mindspeed_without_a_checkout_rejected():
    check_backend("megatron")
    with pytest.raises(PreflightError, match=r"--backend=mindspeed is invalid: MindSpeed cannot be imported\. Put"):
        check_backend("mindspeed")


def test_overrides_of_the_user_come_last(tmp_path):
    options, dry_run = parse_arguments(["--steps", "3", "--output", str(tmp_path), "--", "trainer.save_freq=1"])
    assert not dry_run and options.steps == 3
    assert make_plan(options, "now").run_command()[-1] == "trainer.save_freq=1"


def library_of(keys):
    """Return the modules of `external_lib`, which every process loads that reads the model's configuration."""
    [library] = [key for key in keys if key.startswith("actor_rollout_ref.model.external_lib=")]
    return library.partition("=")[2].strip("[]").split(",")


def test_precision_decides_the_types(tmp_path):
    for precision, own in (("float32", ["verl_plugin.megatron_float32"]), ("bfloat16", [])):
        keys = list(make_plan(Options(precision=precision, output=tmp_path), "now").overrides())
        behind = ["verl_plugin.finite_steps", "verl_plugin.alltoallv.engines", REPLAY]
        assert library_of(keys) == [ENGINES, "verl_plugin.megatron_core", *own, *behind, HEARTBEATS, PEAKS, OFFLOAD]
        assert f"actor_rollout_ref.rollout.dtype={precision}" in keys


def test_naive_weights_load_nothing_of_alltoallv(tmp_path):
    behind = ["verl_plugin.megatron_float32", "verl_plugin.finite_steps"]
    libraries = {
        "fsdp2": [],
        "megatron": ["verl_plugin.megatron_core", *behind, REPLAY],
        "mindspeed": ["verl_plugin.mindspeed", *behind],
    }
    for backend, library in libraries.items():
        keys = list(make_plan(Options(backend=backend, weights="naive", output=tmp_path), "now").overrides())
        assert library_of(keys) == [ENGINES, *library, HEARTBEATS, PEAKS, OFFLOAD]
        assert not any("alltoallv" in key for key in keys)


@pytest.mark.parametrize(
    ("model", "backend", "overrides", "loads", "replays"),
    [
        ("qwen3_moe", "megatron", (), True, True),
        ("qwen3", "megatron", (), False, False),  # without experts
        ("qwen3_moe", "fsdp2", (), False, False),
        ("qwen3_moe", "fsdp2", (ROUTING_REPLAY,), True, False),
    ],
)
def test_experts_are_replayed_where_megatron_trains_them(tmp_path, model, backend, overrides, loads, replays):
    options = Options(model=model, backend=backend, overrides=overrides, output=tmp_path)
    keys = list(make_plan(options, "now").overrides())
    assert (REPLAY in library_of(keys)) is loads
    assert (ROUTING_REPLAY in keys) is replays
    assert ("actor_rollout_ref.actor.megatron.router_replay.mode=R3" in keys) is replays


def test_rehearsal_is_of_deepseek_on_four_dies_by_default(tmp_path):
    options, _ = parse_arguments(["--output", str(tmp_path)])
    assert options == Options(output=tmp_path) and options.steps == 25
    keys = set(make_plan(options, "now").overrides())
    assert "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4" in keys
    assert "trainer.n_gpus_per_node=4" in keys


def test_dry_run_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rehearse.sh", "--dry-run", "--output", str(tmp_path / "run")])
    assert main() == 0
    assert "rehearsal.stack_2026.training" in capsys.readouterr().out and not (tmp_path / "run").exists()


def test_tiny_deepseek_is_routed_as_published():
    """Both vLLM-Ascend's router kernel and Megatron-core's rule score a group by its two best experts."""
    import torch
    from vllm_ascend.ops.fused_moe.experts_selector import check_npu_moe_gating_top_k

    model = TINY_MODELS["deepseek_v3"] | CHANGES["deepseek_v3"]
    groups, chosen, experts = model["n_group"], model["topk_group"], model["num_experts_per_tok"]
    assert check_npu_moe_gating_top_k(
        torch.empty(1, model["hidden_size"]), experts, model["norm_topk_prob"], chosen, groups, model["scoring_func"]
    )
    assert experts // chosen == 2 and model["n_routed_experts"] % groups == model["n_routed_experts"] % 4 == 0
