"""The plan of a job: the cluster's figures, what does not fit, and the command."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.scripts.cluster_files import load_script
from verl_patches.features.memory_plan.device import device_memory
from verl_patches.features.memory_plan.job import read_job
from verl_patches.features.memory_plan.report import Machine, describe, make_job_plan
from verl_patches.trainer.main_ppo import compose

MODEL = Path(__file__).with_name("deepseek_v3_config.json")
DIE = 61 << 30


@cache
def job(name: str, *overrides: str, swaps: bool = True):
    config = compose(f"deepseek_v3_256die_{name}", ["actor_rollout_ref.model.path=/m", *overrides])
    return read_job(OmegaConf.to_container(config, resolve=True), json.loads(MODEL.read_text()), swaps)


@pytest.mark.parametrize(("name", "weights", "sequences"), [("random_init", 25.8, 87), ("true_weight", 30.9, 70)])
def test_the_cluster_jobs_have_their_known_shape(name, weights, sequences):
    memory = device_memory(job(name), DIE, staging=2 << 30)
    assert memory.weights_rollout / 1e9 == pytest.approx(weights, abs=0.05)
    assert memory.weights_training / 1e9 == pytest.approx(6.77, abs=0.01)
    assert memory.kv_tokens // 4096 == sequences
    # The engine fills its share of the die, alignment of the cache beside it.
    assert memory.phases["rollout"] == pytest.approx(0.8 * DIE, rel=0.02)


def test_more_instances_leave_less_for_the_cache():
    one, two = (device_memory(job(name), DIE, 0) for name in ("random_init", "true_weight"))
    token = 61 * 576 * 2
    lost = (one.kv_tokens - two.kv_tokens) * token
    # Each cache is cut to whole blocks of 128 tokens.
    assert lost == pytest.approx(two.weights_rollout - one.weights_rollout, abs=128 * token)


def test_the_optimizer_needs_the_host():
    kept, swapped = (device_memory(job("random_init", swaps=swaps), DIE, 0) for swaps in (False, True))
    assert kept.optimizer == swapped.optimizer
    # Experts have no replica to share with: 12 bytes for each element of a rank.
    assert kept.optimizer == pytest.approx(12 * (2818572288 + (3386509312 - 2818572288) // 8), rel=1e-6)
    assert kept.phases["update"] > DIE > swapped.phases["update"]


def test_what_the_engine_holds_beside_weights_and_cache_follows_its_scheduler():
    chunked = scaled_plan().job
    whole = dataclasses.replace(chunked, chunks_prompts=False)
    assert chunked.chunks_prompts
    scheduler = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.ascend_scheduler_config"
    assert not job("random_init", f"{scheduler}.enable_chunked_prefill=false").chunks_prompts
    assert job("random_init", f"{scheduler}.enabled=false").chunks_prompts
    one, other = (device_memory(each, DIE, 0).phases["idle"] for each in (chunked, whole))
    # A byte mask, and rows of 576 elements of two bytes: 4 blocks of 128 tokens for each of 8 sequences.
    assert one - other == 2048 * 2048 + 4 * 128 * 8 * 576 * 2


@cache
def scaled_plan(*overrides: str):
    """The full model on 8 dies of no known size."""
    layers = "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[31,30]"
    return make_job_plan(job("random_init", "+scale=emulated_8_dies", layers, *overrides), Machine(1 << 50))


def test_what_does_not_fit_is_named_with_a_remedy():
    assert scaled_plan().problems() == []
    plan = dataclasses.replace(scaled_plan(), machine=Machine(1 << 30, host=1 << 20, disk=1 << 10))
    named = [problem.partition(":")[0] for problem in plan.problems()]
    assert named == ["idle", "reshard", "rollout", "ref", "update", "host", "disk"]
    assert "lower actor_rollout_ref.rollout.gpu_memory_utilization" in plan.problems()[2]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (128, "room for 128 of the 208 tokens of 8 full sequences"),
        (0, "room for 0 tokens, and one sequence may have 26"),
    ],
)
def test_a_cache_that_is_too_small_is_named(tokens, says):
    device = dataclasses.replace(scaled_plan().device, kv_tokens=tokens)
    (problem,) = dataclasses.replace(scaled_plan(), device=device).problems()
    assert says in problem


def test_the_description_holds_the_arithmetic_of_batches():
    said = describe(scaled_plan())
    assert "8 prompts x 4 = 32 sequences of up to 26 tokens" in said and "everything fits" in said
    assert "an engine       8 sequences, 8 at a time" in said
    assert "a replica       16 sequences, 16 micro batches of 1" in said


@pytest.fixture
def tiny_model(tmp_path) -> Path:
    from verl_patches.features.tiny_model.architecture import tiny_config

    tiny_config(0, 1, 2).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_the_command_ends_with_the_answer(tiny_model, capsys):
    main = load_script("scripts/plan.py").main
    line = ["--config-name", "deepseek_v3_256die_random_init", "--model", str(tiny_model), "+scale=emulated_8_dies"]
    assert main([*line, "--die-memory", "1GiB"]) == 0 and "everything fits" in capsys.readouterr().out
    assert main([*line, "--die-memory", "1MiB"]) == 1 and "DOES NOT FIT: idle" in capsys.readouterr().out
    assert main([*line, "--json"]) == 0 and json.loads(capsys.readouterr().out)["phases"]["update"] > 0
    assert main([*line, "no.such.key=1"]) == 2 and "error: " in capsys.readouterr().err
    assert main([*line, "trainer.n_gpus_per_node=6"]) == 2 and "error: 6 dies" in capsys.readouterr().err
