"""The plan of jobs on FSDP: published sizes, what fits which card, and the emulated NPU's meters."""

import json
from pathlib import Path

import pytest

from post_training.plan.fsdp import fsdp_memory, read_fsdp_job
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from scripts import plan
from tests.ranks import run_ranks
from tests.rig.processes import VENDOR_ENVIRONMENT
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

DATA = Path(__file__).parents[3] / "data" / "arithmetic" / "train.jsonl"
ONE_CARD, EIGHT_DIES = "qwen2_5_1_5b_math_one_card", "qwen2_5_0_5b_gsm8k"
QWEN = {
    # Of the config.json of each published model, and how many parameters its files have.
    "0.5B": ((896, 4864, 24, 14, 2, 151936, True), 494_032_768),
    "1.5B": ((1536, 8960, 28, 12, 2, 151936, True), 1_543_714_304),
    "7B": ((3584, 18944, 28, 28, 4, 152064, False), 7_615_616_512),
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "tie_word_embeddings")  # fmt: skip


def described(folder, size):
    values = dict(zip(NAMES, QWEN[size][0], strict=True))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 32768} | values))
    return folder / "config.json"


def figures(capsys, folder, name, size, *more):
    """The exit code, and what is printed as JSON."""
    code = plan.main(["--config-name", name, "--model", str(described(folder, size)), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("size", QWEN)
def test_weights_gradients_and_moments_are_those_of_the_published_parameters(capsys, tmp_path, size):
    _, found = figures(capsys, tmp_path, ONE_CARD, size)
    parameters = QWEN[size][1]
    assert (found["weights"], found["gradients"], found["optimizer"]) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    _, found = figures(capsys, tmp_path, EIGHT_DIES, size)
    assert found["optimizer"] == -(-parameters // 8) * 8 and found["engine_weights"] == pytest.approx(
        parameters, rel=0.01
    )


def test_the_one_card_job_leaves_a_fifth_of_64_gb(capsys, tmp_path):
    code, found = figures(capsys, tmp_path, ONE_CARD, "1.5B")
    assert code == 0 and max(found["phases"].values()) < 0.8 * found["die"]


def test_32_gb_hold_a_rollout_with_the_optimizer_on_the_host_and_no_update(capsys, tmp_path):
    """An update has the moments on the die, wherever they are meanwhile."""
    card = ("--die-memory", "29GiB")
    away = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    _, resident = figures(capsys, tmp_path, ONE_CARD, "1.5B", *card)
    code, moved = figures(capsys, tmp_path, ONE_CARD, "1.5B", *card, away)
    assert resident["phases"]["rollout"] - moved["phases"]["rollout"] == moved["optimizer"]
    assert code == 1 and resident["phases"]["update"] == moved["phases"]["update"] > moved["die"]
    assert plan.main(["--config-name", ONE_CARD, "--model", str(described(tmp_path, "1.5B")), *card, away]) == 1
    assert "DOES NOT FIT: update: " in capsys.readouterr().out
    code, small = figures(capsys, tmp_path, ONE_CARD, "0.5B", *card)
    assert code == 0 and max(small["phases"].values()) < 0.8 * small["die"]


def test_7b_fits_eight_dies(capsys, tmp_path):
    code, found = figures(capsys, tmp_path, EIGHT_DIES, "7B")
    assert code == 0 and max(found["phases"].values()) < 0.8 * found["die"]
    assert figures(capsys, tmp_path, ONE_CARD, "7B")[0] == 1


def test_a_die_with_less_than_the_plan_is_refused(capsys, tmp_path):
    fixed = "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=100"
    _, found = figures(capsys, tmp_path, ONE_CARD, "1.5B", "--emulated", fixed)
    most = max(found["phases"].values())
    for size, code in ((most, 0), (most * 95 // 100, 1)):
        assert figures(capsys, tmp_path, ONE_CARD, "1.5B", "--emulated", fixed, "--die-memory", str(size))[0] == code


def test_time_is_modelled_for_megatron_alone(capsys, tmp_path):
    assert plan.main(["--config-name", ONE_CARD, "--model", str(described(tmp_path, "0.5B")), "--time"]) == 2
    assert "--time models Megatron's steps" in capsys.readouterr().err


# A vocabulary that makes logits a third of the peak, and layers that are small beside it.
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 32000}
STEP = (
    "+scale=emulated_qwen2_5", "data.max_prompt_length=64", "data.max_response_length=64", "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.max_model_len=128",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
)  # fmt: skip


@pytest.mark.exhaustive
def test_one_die_needs_what_the_plan_says(monkeypatch, tmp_path):
    """Two steps without an engine, so that there is nothing but weights, moments and what an update needs."""
    request = CheckpointRequest(DATA, 0, "bfloat16", model_type="qwen2", warm_start=None, changes=tuple(SIZES.items()))
    make_checkpoint(request, tmp_path / "model", lambda step, loss: None)
    own = (f"actor_rollout_ref.model.path={tmp_path}/model", f"actor_rollout_ref.overlay.measure.output_dir={tmp_path}")
    overrides = [*STEP, *own, "trainer.n_gpus_per_node=1"]
    (tmp_path / "request.json").write_text(json.dumps({"configuration": ONE_CARD, "overrides": overrides}))
    for name, value in (VENDOR_ENVIRONMENT | {"NPU_EMULATOR_CAPACITY_MB": "4096", "LOCAL_WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    run_ranks("tests.post_training.plan.fsdp_memory_program", 1, tmp_path, 550)
    peaks = json.loads((tmp_path / "memory" / "0.json").read_text())["peak_bytes"]
    model = json.loads((tmp_path / "model" / "config.json").read_text())
    planned = fsdp_memory(read_fsdp_job(resolved(compose(ONE_CARD, overrides)), model), 4 << 30).phases
    ratios = {phase: planned[phase] / peaks[phase] for phase in ("old_log_prob", "ref", "update")}
    print(ratios)
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios.values()), ratios
    # Control: without Adam's moments, or without the logits, the plan would be further off than that.
    assert 8 * 20_814_080 > 0.1 * peaks["update"] and 3 * 512 * 32000 * 2 > 0.1 * peaks["update"]
