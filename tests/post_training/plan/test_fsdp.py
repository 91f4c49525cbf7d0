"""Plans of FSDP jobs match published sizes and the emulated NPU's meters, and tell which jobs fit which card."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from post_training.plan.fsdp import fsdp_memory, read_fsdp_job
from rehearsal.plan import run_environment
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from scripts import plan
from tests.forked import FSDP
from tests.ranks import run_ranks
from tests.worker_processes.processes import VENDOR_ENVIRONMENT
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

ROOT = Path(__file__).parents[3]
DATA = ROOT / "data" / "arithmetic" / "train.jsonl"
ONE_CARD, EIGHT_DIES = "qwen2_5_1_5b_math_one_card", "qwen2_5_0_5b_gsm8k"
QWEN = {
    # Values of each published model's config.json, and the number of parameters in its files.
    "0.5B": ((896, 4864, 24, 14, 2, 151936, True), 494_032_768),
    "1.5B": ((1536, 8960, 28, 12, 2, 151936, True), 1_543_714_304),
    "7B": ((3584, 18944, 28, 28, 4, 152064, False), 7_615_616_512),
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "tie_word_embeddings")  # fmt: skip


NAMED = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}


def described(folder, size):
    values = dict(zip(NAMES, QWEN[size][0], strict=True))
    (folder / "config.json").write_text(json.dumps(NAMED | values))
    return folder / "config.json"


def device_bytes(capsys, folder, name, size, *more):
    """Return the plan's exit code and its JSON output."""
    code = plan.main(["--config-name", name, "--model", str(described(folder, size)), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("size", QWEN)
def test_weights_gradients_and_moments_are_those_of_the_published_parameters(capsys, tmp_path, size):
    _, found = device_bytes(capsys, tmp_path, ONE_CARD, size)
    parameters = QWEN[size][1]
    assert (found["weights"], found["gradients"], found["optimizer"]) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    _, found = device_bytes(capsys, tmp_path, EIGHT_DIES, size)
    assert found["optimizer"] == -(-parameters // 8) * 8 and found["engine_weights"] == pytest.approx(
        parameters, rel=0.01
    )


def test_the_one_card_job_leaves_a_fifth_of_64_gb(capsys, tmp_path):
    code, found = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B")
    assert code == 0 and max(found["phases"].values()) < 0.8 * found["die"]


def test_32_gb_hold_a_rollout_with_the_optimizer_on_the_host_and_no_update(capsys, tmp_path):
    """An update needs the moments on the die, even if they are offloaded in other phases."""
    card = ("--die-memory", "29GiB")
    away = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    _, resident = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", *card)
    code, moved = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", *card, away)
    assert resident["phases"]["rollout"] - moved["phases"]["rollout"] == moved["optimizer"]
    assert code == 1 and resident["phases"]["update"] == moved["phases"]["update"] > moved["die"]
    assert plan.main(["--config-name", ONE_CARD, "--model", str(described(tmp_path, "1.5B")), *card, away]) == 1
    assert "DOES NOT FIT: update: " in capsys.readouterr().out
    code, small = device_bytes(capsys, tmp_path, ONE_CARD, "0.5B", *card)
    assert code == 0 and max(small["phases"].values()) < 0.8 * small["die"]


A2_64, A2_32 = (ROOT / "scripts" / "env" / f"a2_8_cards_{size}gb.env" for size in (64, 32))


def test_misfit_job_is_told_a_fitting_layout(capsys, tmp_path):
    """Try each suggestion: its settings pass the checks, and the plan fits with the announced margin."""
    named = ["--config-name", ONE_CARD, "--model", str(described(tmp_path, "1.5B")), "--cluster", str(A2_32)]
    assert plan.main(named) == 1
    said = capsys.readouterr().out
    found = re.findall(r"^fits, (\d+)% of a die left: (.+)$", said, re.MULTILINE)
    assert len(found) == 2 and "DOES NOT FIT" in said
    for left, settings in found:
        assert plan.main([*named, *settings.split()]) == 0
        assert f"left              {left}% of a die" in capsys.readouterr().out
    (here, few), (room, more) = found
    assert "n_gpus_per_node" not in few and int(here) < 20
    assert more == "trainer.n_gpus_per_node=2" and int(room) >= 20


def test_job_that_fits_nowhere_gets_no_advice(capsys, tmp_path):
    named = ["--config-name", ONE_CARD, "--model", str(described(tmp_path, "7B")), "--die-memory", "4GiB"]
    assert plan.main(named) == 1
    assert not re.search("^fits", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("cluster", "size", "code"), [(A2_64, "1.5B", 0), (A2_32, "1.5B", 1), (A2_32, "0.5B", 0)])
def test_memory_of_a_die_is_that_of_the_clusters_file(capsys, tmp_path, cluster, size, code):
    found = device_bytes(capsys, tmp_path, ONE_CARD, size, "--cluster", str(cluster))
    assert found[0] == code and found[1]["die"] == {A2_64: 61 << 30, A2_32: 29 << 30}[cluster]
    asked = device_bytes(capsys, tmp_path, ONE_CARD, size, "--cluster", str(cluster), "--die-memory", "50GiB")
    assert asked[1]["die"] == 50 << 30


def test_plan_rejects_what_the_chip_of_the_file_lacks(capsys, tmp_path):
    model = (Path(__file__).with_name("deepseek_v3_config.json")).read_text()
    (tmp_path / "config.json").write_text(model)
    job = ["--config-name", "deepseek_v3_256die_random_init", "--model", str(tmp_path / "config.json")]
    spread = "actor_rollout_ref.overlay.rollout.expert_parallel_size=8"
    assert plan.main([*job, "--cluster", str(A2_64), spread]) == 2
    assert "experts are on 8 dies of an Atlas A2" in capsys.readouterr().err
    assert plan.main([*job, "--cluster", str(A2_64), "--time"]) == 2
    assert "CHIP=A2" in capsys.readouterr().err


def test_7b_fits_eight_dies(capsys, tmp_path):
    code, found = device_bytes(capsys, tmp_path, EIGHT_DIES, "7B")
    assert code == 0 and max(found["phases"].values()) < 0.8 * found["die"]
    assert device_bytes(capsys, tmp_path, ONE_CARD, "7B")[0] == 1


def test_the_engines_own_limit_of_sequences_counts(capsys, tmp_path):
    """rollout.max_num_seqs reaches no engine; engine_kwargs does."""
    _, found = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B")
    name = "actor_rollout_ref.rollout.max_num_seqs=512"
    assert device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", name)[1] == found
    _, limited = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", f"+{name.replace('max_', 'engine_kwargs.vllm.max_')}")
    assert limited["kv_tokens"] < found["kv_tokens"]


@pytest.mark.parametrize(
    ("ulysses", "micro", "micro_batches"), [(1, 20, 2), (1, 40, 1), (2, 40, 2), (2, 80, 1), (4, 80, 2), (2, 20, 4)]
)
def test_sequence_parallelism_makes_fewer_replicas(ulysses, micro, micro_batches, tmp_path):
    """Split 64 prompts x 5 answers over 8 dies: dies of a Ulysses group share sequences, so a replica has more.

    With several micro batches, gradients stay from the first one on, which a single micro batch does not need.
    """
    actor = "actor_rollout_ref.actor"
    overrides = [f"{actor}.ulysses_sequence_parallel_size={ulysses}", f"{actor}.ppo_micro_batch_size_per_gpu={micro}"]
    config = resolved(compose(EIGHT_DIES, [*overrides, "actor_rollout_ref.model.use_remove_padding=true"]))
    job = read_fsdp_job(config, json.loads(described(tmp_path, "0.5B").read_text()))
    assert 64 * 5 // (8 // ulysses) // micro == micro_batches
    assert job.accumulates == (micro_batches > 1)
    several, one = (fsdp_memory(replace(job, accumulates=flag), 61 << 30) for flag in (True, False))
    assert several.phases["update"] > one.phases["update"]


GAE = ("algorithm.adv_estimator=gae",)


@pytest.mark.parametrize("size", ["0.5B", "7B"])
def test_a_critic_has_weights_and_moments_of_its_own(capsys, tmp_path, size):
    """The critic drops the output layer of a model whose embeddings are not tied."""
    _, alone = device_bytes(capsys, tmp_path, ONE_CARD, size, "--die-memory", "400GiB")
    code, found = device_bytes(capsys, tmp_path, ONE_CARD, size, *GAE, "--die-memory", "400GiB")
    values = dict(zip(NAMES, QWEN[size][0], strict=True))
    hidden, own_layer = values["hidden_size"], not values["tie_word_embeddings"]
    parameters = QWEN[size][1] - own_layer * hidden * values["vocab_size"] + hidden + 1
    critic = found["critic_weights"] + found["critic_optimizer"]
    assert code == 0 and (found["critic_weights"], critic) == (4 * parameters, 12 * parameters)
    assert alone["critic_weights"] == 0 and set(found["phases"]) - set(alone["phases"]) == {"values", "update_critic"}
    # The critic stays on the die during the actor's update, and needs gradients in its own.
    assert found["phases"]["update"] - alone["phases"]["update"] == critic
    assert found["phases"]["update_critic"] > found["weights"] + found["optimizer"] + critic + 4 * parameters


def test_critic_on_the_host_frees_device_memory(capsys, tmp_path):
    away = [f"critic.model.fsdp_config.{name}_offload=true" for name in ("param", "optimizer")]
    _, resident = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", *GAE)
    _, moved = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", *GAE, *away)
    critic = resident["critic_weights"] + resident["critic_optimizer"]
    assert resident["phases"]["update"] - moved["phases"]["update"] == critic
    assert resident["phases"]["update_critic"] == moved["phases"]["update_critic"]
    # The engine fills its share with blocks of 128 tokens: keys and values, two heads of width 128, 28 layers, 2 bytes.
    freed, block = moved["kv_cache"] - resident["kv_cache"], 128 * 28 * 2 * 2 * 128 * 2
    assert freed == pytest.approx(resident["critic_weights"], abs=block)


def test_a_critic_of_another_model_is_not_planned(capsys, tmp_path):
    named = ["--config-name", ONE_CARD, "--model", str(described(tmp_path, "0.5B"))]
    assert plan.main([*named, *GAE, "critic.model.path=/other"]) == 2
    assert "critic.model.path=/other is invalid: a plan supports one model" in capsys.readouterr().err


def test_a_die_with_less_than_the_plan_rejected(capsys, tmp_path):
    fixed = "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=100"
    _, found = device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", "--emulated", fixed)
    most = max(found["phases"].values())
    for size, code in ((most, 0), (most * 95 // 100, 1)):
        assert (
            device_bytes(capsys, tmp_path, ONE_CARD, "1.5B", "--emulated", fixed, "--die-memory", str(size))[0] == code
        )


def test_time_is_modelled_for_megatron_alone(capsys, tmp_path):
    assert plan.main(["--config-name", ONE_CARD, "--model", str(described(tmp_path, "0.5B")), "--time"]) == 2
    assert "--time models Megatron's steps" in capsys.readouterr().err


# The vocabulary makes logits a third of the peak; the layers are small in comparison.
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 32000}
STEP = (
    "+scale=emulated_qwen2_5", "data.max_prompt_length=64", "data.max_response_length=64", "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.max_model_len=128",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("estimator", "dies", "micro", "strategy"),
    [
        ("grpo", 1, 4, "fsdp"),
        ("grpo", 1, 8, "fsdp"),
        ("gae", 1, 4, "fsdp"),
        ("grpo", 2, 2, "fsdp"),
        ("grpo", 2, 4, "fsdp"),
        ("grpo", 1, 4, "fsdp2"),
        ("grpo", 2, 2, "fsdp2"),
        ("gae", 2, 4, "fsdp2"),
    ],
)
def test_a_die_needs_what_the_plan_says(monkeypatch, tmp_path, estimator, dies, micro, strategy):
    """Run two steps without an engine, so that only weights, moments and the update's own needs count."""
    request = CheckpointRequest(DATA, 0, "bfloat16", model_type="qwen2", warm_start=None, changes=tuple(SIZES.items()))
    make_checkpoint(request, tmp_path / "model", lambda step, loss: None)
    own = (f"actor_rollout_ref.model.path={tmp_path}/model", f"actor_rollout_ref.overlay.measure.output_dir={tmp_path}")
    overrides = [*STEP, *own, f"trainer.n_gpus_per_node={dies}", f"algorithm.adv_estimator={estimator}"]
    actor = "actor_rollout_ref.actor"
    overrides += [f"{actor}.ppo_micro_batch_size_per_gpu={micro}", f"{actor}.strategy={strategy}"]
    (tmp_path / "request.json").write_text(json.dumps({"configuration": ONE_CARD, "overrides": overrides}))
    for name, value in (
        VENDOR_ENVIRONMENT | {"NPU_EMULATOR_CAPACITY_MB": "4096", "LOCAL_WORLD_SIZE": str(dies)}
    ).items():
        monkeypatch.setenv(name, value)
    run_ranks("tests.post_training.plan.fsdp_memory_program", dies, tmp_path, 550, imported=FSDP)
    peaks = json.loads((tmp_path / "memory" / "0.json").read_text())["peak_bytes"]
    model = json.loads((tmp_path / "model" / "config.json").read_text())
    planned = fsdp_memory(read_fsdp_job(resolved(compose(ONE_CARD, overrides)), model), 4 << 30).phases
    phases = ["old_log_prob", "ref", "update", *(("values", "update_critic") if estimator == "gae" else ())]
    ratios = {phase: planned[phase] / peaks[phase] for phase in phases}
    print(ratios)
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios.values()), ratios
    # Control: without Adam's moments, or without the logits, the plan would be further off than that.
    assert 8 * 20_814_080 // dies > 0.1 * peaks["update"] and 3 * 256 * 32000 * 4 > 0.1 * peaks["old_log_prob"]


# One prompt with four answers of 26 tokens, and an engine that is just large enough.
ONE_STEP = (
    "+scale=emulated_qwen2_5", "data.train_batch_size=1", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=4",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=8",
    "actor_rollout_ref.rollout.max_num_batched_tokens=64",
    "trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false",
)  # fmt: skip


@pytest.mark.exhaustive
def test_a_whole_step_of_a_published_size_needs_what_the_plan_says(tmp_path):
    """Run a step with Ray and the engine, in bfloat16, on 494 million untrained weights; takes 18 GB.

    Before the first update there are no moments, but the plan counts them in every phase, as in all later steps.
    """
    changes = tuple(zip(NAMES, QWEN["0.5B"][0], strict=True))
    request = CheckpointRequest(DATA, 0, "bfloat16", model_type="qwen2", warm_start=None, changes=changes)
    make_checkpoint(request, tmp_path / "model", lambda step, loss: None)
    convert = [sys.executable, ROOT / "scripts" / "json_to_parquet.py", "--output_dir", tmp_path, "--json_path", DATA]
    subprocess.run(convert, check=True)
    files = [f"data.{name}_files={tmp_path}/train.parquet" for name in ("train", "val")]
    own = (f"actor_rollout_ref.model.path={tmp_path}/model", f"actor_rollout_ref.overlay.measure.output_dir={tmp_path}")
    overrides = [*ONE_STEP, *own, *files, f"trainer.default_local_dir={tmp_path}/checkpoints"]
    environment = os.environ | run_environment(overrides) | {"PYTHONPATH": str(ROOT)}
    environment |= {"NPU_EMULATOR_DEVICES": "1", "NPU_EMULATOR_CAPACITY_MB": "12288"}
    command = [sys.executable, "-m", "rehearsal.training", "--config-name", ONE_CARD, *overrides]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    peaks = json.loads((tmp_path / "memory" / "0.json").read_text())["peak_bytes"]
    model = json.loads((tmp_path / "model" / "config.json").read_text())
    planned = fsdp_memory(read_fsdp_job(resolved(compose(ONE_CARD, overrides)), model), 12 << 30)
    first = {phase: size - (phase != "update") * planned.optimizer for phase, size in planned.phases.items()}
    ratios = {phase: first[phase] / peaks[phase] for phase in first}
    print(peaks, first, ratios)
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios.values()), ratios
    # Control: with the moments in the earlier phases, the plan would be further off than that.
    assert planned.optimizer > 0.1 * max(peaks.values())
