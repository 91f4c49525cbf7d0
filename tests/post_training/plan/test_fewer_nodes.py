"""Layouts for fewer nodes keep the batch, must fit by the plan, and name the resource that is short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from post_training.report.run_folder import at
from rehearsal.tiny_model.architecture import TINY_MODELS
from scripts.plan import configuration_of
from tests.scripts.cluster_files import load_script

MEGATRON = "actor_rollout_ref.actor.megatron"
TP, PP, EP = (f"{MEGATRON}.{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
ROLLOUT_EP = "actor_rollout_ref.overlay.rollout.expert_parallel_size"
ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
# Two nodes of four dies, as in the tests with network namespaces.
TWO_NODES = ("+scale=emulated_8_dies", "trainer.nnodes=2", "trainer.n_gpus_per_node=4")
KEPT = (
    "data.train_batch_size", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "data.seed", "data.max_response_length",
)  # fmt: skip


@pytest.fixture
def plan(tmp_path, capsys):
    """A function that asks the command for a job's layouts; returns the exit code and the result, or the error."""
    program = load_script("scripts/plan.py")

    def run(name: str, *words: str, model: dict | None = None) -> tuple[int, dict | str]:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(model or {"model_type": "deepseek_v3", **TINY_MODELS["deepseek_v3"]}))
        code = program.main(["--config-name", name, "--model", str(file), "--fewer-nodes", "--json", *words])
        said = capsys.readouterr()
        return code, json.loads(said.out) if code < 2 else said.err

    return run


def published() -> dict:
    """Return the model's published config.json for weights in bfloat16."""
    model = json.loads(Path(__file__).with_name("deepseek_v3_config.json").read_text())
    return {key: value for key, value in model.items() if key != "quantization_config"}


def test_half_of_the_256_dies_hold_the_job(plan):
    """Data parallelism is halved, and with it the number of ranks over which experts can be spread."""
    words = ("--swap-optimizer", "--min-nodes", "8", "actor_rollout_ref.actor.load_weight=false")
    code, found = plan("deepseek_v3_256die_true_weight", *words, model=published())
    (layout,) = found["fitting"]
    assert code == 0 and layout["nodes"] == 8 and found["configured"] == 16
    assert layout["text"] == "TP4 PP8 EP4 DP4, rollout 1 x (TP2 DP64 EP128)"
    assert layout["overrides"] == ["trainer.nnodes=8", f"{EP}=4"]
    assert list(map(int, found["short"])) == list(range(15, 8, -1))
    assert set(found["short"].values()) == {"data.train_batch_size=512 does not divide among the dies"}


def test_layout_of_one_node_passes_the_checks_and_keeps_the_batch(plan):
    code, found = plan("deepseek_v3_256die_random_init", *TWO_NODES, "--die-memory", "256MiB", "--emulated")
    (layout,) = found["fitting"]
    assert code == 0 and layout["overrides"] == ["trainer.nnodes=1", f"{EP}=1", f"{ROLLOUT_EP}=4"]
    model = {"model_type": "deepseek_v3", **TINY_MODELS["deepseek_v3"]}
    before, after = (
        configuration_of(
            "deepseek_v3_256die_random_init", ["actor_rollout_ref.model.path=/m", *TWO_NODES, *more], model
        )
        for more in ((), layout["overrides"])
    )
    assert [at(before[0], key) for key in KEPT] == [at(after[0], key) for key in KEPT]


def test_layout_with_fewer_dies_than_a_replica_changes_parallel_sizes(plan):
    """TP2 x PP2 needs four dies; the two remaining ones run TP2 or PP2."""
    words = ("+scale=emulated_8_dies", "trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{EP}=1")
    words += ("rollout_instance.all_dies=4", "--die-memory", "256MiB", "--emulated")
    code, found = plan("deepseek_v3_256die_random_init", *words)
    (layout,) = found["fitting"]
    given = dict(word.split("=", 1) for word in layout["overrides"])
    assert code == 0 and int(given.get(TP, 2)) * int(given.get(PP, 2)) == 2, layout
    stages = given.get(f"{MEGATRON}.override_transformer_config.num_layer_list", "[2,1]")
    assert sum(json.loads(stages)) == 3 and len(json.loads(stages)) == int(given.get(PP, 2))


@pytest.mark.parametrize(
    "memory, short",
    [
        (["--die-memory", "20MiB"], r"update: 0\.\d+ GB a die, but a die has 0\.02"),
        (["--die-memory", "256MiB", "--host-memory", "9GiB"], r"host: \d+ GB a node, but a node has 10"),
    ],
)
def test_short_memory_is_named(plan, memory, short):
    code, found = plan("deepseek_v3_256die_random_init", *TWO_NODES, *memory, "--emulated")
    assert code == 1 and not found["fitting"]
    assert re.search(short, found["short"]["1"]), found


@pytest.mark.parametrize("memory, micro", [("256MiB", []), ("44MiB", [f"{MICRO}=8"])])
def test_micro_batch_gets_smaller_where_it_decides(plan, memory, micro):
    """An update with micro batches of 16 sequences takes 45.9 MiB of a die, one with 8 takes 42.0 MiB."""
    words = (*TWO_NODES, f"{MICRO}=16", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1")
    code, found = plan("deepseek_v3_256die_random_init", *words, "--die-memory", memory, "--emulated")
    assert code == 0 and [word for word in found["fitting"][0]["overrides"] if word.startswith(MICRO)] == micro


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["trainer.save_freq=-1"], "trainer.save_freq=-1 is invalid"),
        (["actor_rollout_ref.overlay.exact_loss.enabled=false"], "overlay.exact_loss.enabled=False is invalid"),
        (["trainer.nnodes=1", f"{EP}=1", f"{ROLLOUT_EP}=4"], "trainer.nnodes=1 is invalid"),
        (["--min-nodes", "2"], "--min-nodes=2 is invalid: the job has 2 nodes. Set it to a number from 1 to 1"),
        (["--time"], "--time and --fewer-nodes are two plans"),
    ],
)
def test_job_without_fewer_nodes_support_rejected(plan, words, sentence):
    code, said = plan("deepseek_v3_256die_random_init", *TWO_NODES, *words)
    assert code == 2 and sentence in said, said


def test_fsdp_on_one_die_has_smaller_engines(plan):
    words = ("+scale=emulated_qwen2_5", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=1")
    words += ("ray_init.address=auto",)
    model = {"model_type": "qwen2", **TINY_MODELS["qwen2"]}
    code, found = plan("qwen2_5_0_5b_gsm8k", *words, "--die-memory", "1GiB", "--emulated", model=model)
    (layout,) = found["fitting"]
    assert code == 0 and layout["overrides"] == ["trainer.nnodes=1", f"{ROLLOUT_TP}=1"]
    assert layout["text"] == "FSDP over 1 dies, rollout 1 x TP1"


def test_layouts_are_printed_a_line_a_number(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **TINY_MODELS["deepseek_v3"]}))
    words = ["--config-name", "deepseek_v3_256die_random_init", "--model", str(tmp_path / "config.json")]
    words += ["--fewer-nodes", "--die-memory", "256MiB", "--emulated", *TWO_NODES, "trainer.nnodes=8"]
    words += ["trainer.n_gpus_per_node=1"]
    load_script("scripts/plan.py").main(words)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "nodes of 8, and how the job continues with them"
    assert any(line.startswith("  7, 6, 5, 3") and "does not divide" in line for line in said), said
    assert any(line.startswith("  4     TP2 PP2 EP1 DP1") for line in said), said
