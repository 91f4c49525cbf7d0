"""The configurations of the 256-die jobs: their values, the changes by scaling, and a reader for every key."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file

from post_training.hang_detection.settings import PHASES as WATCHED_PHASES
from post_training.report.run_folder import read_run
from rehearsal.jobs import scale_of
from rehearsal.tiny_model.architecture import TINY_MODELS
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from scripts import plan
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from tests.scripts.cluster_files import lines_of_a_first_step
from tests.verl_patches.trainer.published_weights import cast, describe, write_published
from tests.verl_patches.trainer.scaled_job import (
    DAPO,
    RANDOM,
    TRUE,
    TWO_DIES,
    assert_exact,
    assert_left_the_reference,
    executed,
    ran_graphs,
    run_scaled_job,
)
from verl_patches.features.catalogue import FEATURES
from verl_patches.trainer.configuration_checks import ConfigurationError, check_configuration
from verl_patches.trainer.main_ppo import CONFIG_FOLDER, compose

ROOT = Path(__file__).parents[3]
JOBS = (RANDOM, TRUE)
STEPS = 2  # steps of the scaled job: the second rolls out with weights that the first has trained
QWEN_DAPO = "qwen2_5_32b_dapo"
FILES = ("deepseek_v3_256die", *JOBS, DAPO, "recipe/dapo", "scale/emulated_8_dies", "graph/off")
MODEL = "actor_rollout_ref.model.path=/weights"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
GRAPH = f"{ENGINE}.additional_config.torchair_graph_config"
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
# The values of the published recipe, by key.
RECIPE = {
    "data.train_batch_size": 512,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 3072,
    "trainer.nnodes": 16,
    "trainer.n_gpus_per_node": 16,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.recompute_old_log_prob": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 512,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.clip_grad": 1.0,
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 4,
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 8,
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": 8,
    "actor_rollout_ref.actor.megatron.sequence_parallel": True,
    f"{TRANSFORMER}.num_layer_list": [7, 7, 8, 8, 8, 8, 8, 7],
    f"{TRANSFORMER}.moe_tp_extend_ep": True,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.rollout.temperature": 0.9,
    "actor_rollout_ref.rollout.top_k": 50,
    "actor_rollout_ref.rollout.top_p": 0.9,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 1024,
    f"{ENGINE}.max_num_seqs": 64,
    f"{ENGINE}.additional_config.refresh": True,
    f"{ENGINE}.additional_config.ascend_scheduler_config.enabled": True,
    f"{ENGINE}.additional_config.ascend_scheduler_config.enable_chunked_prefill": True,
    f"{GRAPH}.enabled": True,
    f"{GRAPH}.use_cached_graph": False,
    # The published value is [64]; smaller ones let the tail of a rollout run in smaller graphs (docs/rollout.md).
    f"{GRAPH}.graph_batch_sizes": [8, 16, 32, 64],
    f"{GRAPH}.enable_multistream_mla": True,
    f"{GRAPH}.enable_multistream_moe": True,
    f"{GRAPH}.enable_view_optimize": False,
    # Not the published value, which gives wrong results with chunked prefill (docs/cluster.md).
    f"{GRAPH}.enable_kv_nz": False,
}


# Settings of verl's recipe for DAPO on Qwen2.5-32B that the other jobs do not have.
DAPOS = {
    "actor_rollout_ref.actor.recompute_old_log_prob": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.clip_ratio_c": 10.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 10,
    "actor_rollout_ref.actor.optim.weight_decay": 0.1,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.max_num_gen_batches": 10,
    "reward_model.overlong_buffer.enable": True,
    "reward_model.overlong_buffer.penalty_factor": 1.0,
}
# Settings of the published job with random weights for its benchmark, which the other job does not have: ignore_eos,
# fix_router and VLLM_ENABLE_FIX_ROUTE, and a recomputation that is on without saying what it covers.
CHECKPOINTING = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_"
OF_A_JOB = {
    RANDOM: {
        "actor_rollout_ref.actor.load_weight": False,
        "actor_rollout_ref.overlay.router_balance.forced": True,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    },
    TRUE: {
        "actor_rollout_ref.actor.load_weight": True,
        "actor_rollout_ref.overlay.router_balance.forced": False,
        "actor_rollout_ref.rollout.ignore_eos": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{CHECKPOINTING}granularity": "full",
        f"{CHECKPOINTING}method": "block",
        f"{CHECKPOINTING}num_layers": 8,
    },
}


def leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield full key and raw value (interpolations as text) of every leaf."""
    for key in node:
        value = node._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none():
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, OmegaConf.to_container(value) if OmegaConf.is_list(value) else value._value()


def keys_of(file: str) -> dict[str, object]:
    """Return the leaves that one of our files sets."""
    node = OmegaConf.load(CONFIG_FOLDER / f"{file}.yaml")
    node.pop("defaults", None)
    return dict(leaves(node))


def flat(name: str, *overrides: str) -> dict[str, object]:
    """Return the composed, resolved configuration by full key."""
    config = compose(name, [MODEL, *overrides])
    OmegaConf.resolve(config)
    return dict(leaves(config))


def changed(first: dict[str, object], second: dict[str, object]) -> set[str]:
    """Return the keys whose values differ."""
    return {key for key in first | second if first.get(key) != second.get(key)}


@pytest.mark.parametrize("job", JOBS)
def test_values_are_those_of_the_recipe(job):
    config, expected = flat(job), RECIPE | OF_A_JOB[job]
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("job", (*JOBS, DAPO))
@pytest.mark.parametrize("variant", [(), ("+graph=off",), ("+scale=emulated_8_dies",)])
def test_every_variant_passes_the_checks_of_the_entry_point(job, variant):
    settings = check_configuration(compose(job, [MODEL, *variant]))
    assert settings.residency.enabled and settings.dp_sync.enabled and settings.reshard.enabled
    assert settings.shared_chunks.enabled and settings.sample_handles.enabled
    assert settings.request_noise.enabled and settings.rollout_rebalance.enabled == (variant != ("+graph=off",))


def test_the_dapo_job_is_the_true_weight_job_with_verls_numbers_for_dapo():
    dapo = flat(DAPO)
    actor, filter_groups = "actor_rollout_ref.actor", "algorithm.filter_groups"
    assert {key: dapo[key] for key in DAPOS} == DAPOS
    differing = changed(dapo, flat(TRUE)) - set(DAPOS)
    assert differing == {
        f"{actor}.kl_loss_coef",
        f"{filter_groups}.metric",
        "actor_rollout_ref.rollout.top_p",
        "actor_rollout_ref.overlay.first_placement.enabled",
        "actor_rollout_ref.overlay.measure.output_dir",
        "critic.ppo_mini_batch_size",
        "custom_reward_function.name",
        "trainer.default_local_dir",
        "trainer.experiment_name",
        "trainer.save_freq",
        "trainer.total_epochs",
        "trainer.total_training_steps",
    }


QWEN = PUBLISHED_CONFIGS["Qwen/Qwen2.5-32B"]


def test_the_job_with_qwen2_5_32b_has_the_numbers_of_verls_recipe_and_is_planned(tmp_path, capsys):
    config = flat(QWEN_DAPO)
    numbers = {
        "data.train_batch_size": 512,
        "data.gen_batch_size": 1536,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 20480,
        "data.truncation": "left",
        "reward_model.overlong_buffer.len": 4096,
        "actor_rollout_ref.rollout.n": 16,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "trainer.test_freq": 5,
    }
    assert {key: config[key] for key in DAPOS | numbers} == DAPOS | numbers
    check_configuration(compose(QWEN_DAPO, [MODEL]), QWEN)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert plan.main(["--config-name", QWEN_DAPO, "--model", str(tmp_path / "config.json")]) == 0
    assert "everything fits" in capsys.readouterr().out


def test_a_job_without_a_model_rejected():
    with pytest.raises(ConfigurationError, match="actor_rollout_ref.model.path is not set. Set it to the folder"):
        check_configuration(compose(JOBS[0], []))


def test_the_jobs_differ_in_weights_instances_length_and_what_makes_a_benchmark():
    random, true = (flat(job) for job in JOBS)
    expert_parallel = "actor_rollout_ref.overlay.rollout.expert_parallel_size"
    assert (random[expert_parallel], true[expert_parallel]) == (256, 128)
    assert changed(random, true) == {
        expert_parallel,
        *OF_A_JOB[RANDOM],
        "actor_rollout_ref.ref.load_weight",
        "critic.load_weight",
        "critic.model.enable_gradient_checkpointing",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.experiment_name",
        "trainer.default_local_dir",
        "actor_rollout_ref.overlay.measure.output_dir",
    }


@pytest.mark.parametrize("job", (*JOBS, DAPO, QWEN_DAPO))
def test_scaling_down_changes_sizes_only(job):
    large, small = flat(job), flat(job, scale_of(job).setting)
    size = re.compile(
        r"^(data\.((train|gen)_batch_size|max_\w+_length|dataloader_num_workers)|rollout_instance\.\w+|mini_batch\.\w+"
        r"|trainer\.(nnodes|n_gpus_per_node|total_training_steps)|(.*\.)?\w+_parallel_size|.*\.num_layer_list"
        r"|.*\.(bucket_bytes|dies_per_node|ppo_mini_batch_size|max_num_seqs|max_num_batched_tokens|graph_batch_sizes)"
        r"|.*\.(num_gpu_blocks_override|overlong_buffer\.len|lease_steps|expert_sets\.share)"
        r"|actor_rollout_ref\.rollout\.(n|prompt_length|response_length)|critic\.(rollout_n|ppo_mini_batch_size)"
        r"|critic\.megatron\.override_transformer_config\.num_layer_list)$"
    )
    different = changed(large, small)
    assert different and not [key for key in different if not size.match(key)]
    for sizes in (large, small):
        longest = sizes["data.max_prompt_length"] + sizes["data.max_response_length"]
        tokens = sizes["actor_rollout_ref.rollout.max_num_batched_tokens"]
        assert tokens == longest if job == QWEN_DAPO else tokens < longest


def test_the_scaled_job_with_qwen2_5_32b_passes_the_checks_of_a_training():
    scaled = compose(QWEN_DAPO, [MODEL, scale_of(QWEN_DAPO).setting])
    tiny = {"model_type": "qwen2", **TINY_MODELS["qwen2"]}
    check_configuration(scaled, tiny | {"num_hidden_layers": 4})
    with pytest.raises(ConfigurationError, match="does not divide the model's 3 layers"):
        check_configuration(scaled, tiny)


@pytest.mark.parametrize("job", JOBS)
def test_switching_the_graph_off_changes_the_graph_only(job):
    different = changed(flat(job), flat(job, "+graph=off"))
    assert f"{GRAPH}.enabled" in different
    assert {key for key in different if not key.startswith(GRAPH)} == {
        "actor_rollout_ref.rollout.enforce_eager",
        "actor_rollout_ref.overlay.rollout_rebalance.enabled",
    }


@pytest.mark.parametrize(("variant", "count"), [((), 4), (("+scale=emulated_8_dies",), 2)])
def test_an_engine_takes_all_sequences_of_a_step_at_once(variant, count):
    config = flat(JOBS[0], *variant)
    dies = config["trainer.nnodes"] * config["trainer.n_gpus_per_node"]
    engines = dies // config["actor_rollout_ref.rollout.tensor_model_parallel_size"]
    sequences = config["data.train_batch_size"] * config["actor_rollout_ref.rollout.n"] // engines
    assert config[f"{ENGINE}.max_num_seqs"] == sequences
    assert config[f"{GRAPH}.graph_batch_sizes"] == [sequences // 8, sequences // 4, sequences // 2, sequences][-count:]


def test_the_benchmark_fits_without_recomputation(capsys):
    """The numbers are those of docs/cluster.md."""
    model = ROOT / "tests" / "post_training" / "plan" / "deepseek_v3_config.json"
    sizes = []
    for recomputed in ("false", "true"):
        override = f"actor_rollout_ref.model.enable_gradient_checkpointing={recomputed}"
        line = ["--config-name", RANDOM, "--model", str(model), "--swap-optimizer", override]
        assert plan.main(line) == 0
        (size,) = re.findall(r"^  update +([0-9.]+)$", capsys.readouterr().out, re.MULTILINE)
        sizes.append(f"{float(size):.1f} GB")
    assert sizes == ["58.6 GB", "28.2 GB"]
    for guide in ("cluster.md", "cluster.zh.md"):
        assert all(size in (ROOT / "docs" / guide).read_text() for size in sizes)


# Readers. A key reaches its reader as a keyword of vLLM's engine, as a field of Megatron's configuration, as a field
# of the overlay's settings, or through OmegaConf, whose reads a run records.


def source(package: str, *path: str) -> str:
    """Return the source of an installed package, which need not be importable here."""
    return Path(find_spec(package).submodule_search_locations[0]).joinpath(*path).read_text()


def dataclass_fields(text: str, name: str) -> set[str]:
    """Return the annotated names in the body of class `name`."""
    body = next(node.body for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


def keys_got_from(text: str, mapping: str) -> set[str]:
    """Return the keys that the source reads from `mapping` with get."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args)
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "get"
        and ast.unparse(call.func.value) == mapping
        and isinstance(call.args[0], ast.Constant)
    }


def attributes_of_the_overlay() -> set[str]:
    """Return the attribute names that the overlay reads outside the module that declares its settings."""
    folders = ("verl_patches", "vllm_patches", "vllm_ascend_patches", "post_training/hang_detection")
    files = [path for each in folders for path in (ROOT / each).rglob("*.py")]
    trees = (ast.parse(path.read_text()) for path in files if path.name != "settings.py")
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def unread_by_the_engine(keys: set[str]) -> set[str]:
    """Return the keys below engine_kwargs.vllm that neither vLLM nor vLLM-Ascend reads."""
    ascend = source("vllm_ascend", "ascend_config.py")
    scheduler = dataclass_fields(source("vllm_ascend", "core", "schedule_config.py"), "AscendSchedulerConfig")
    additional = f"{ENGINE}.additional_config."
    known = {f"{ENGINE}.{name}" for name in dataclass_fields(source("vllm", "engine", "arg_utils.py"), "EngineArgs")}
    known |= {additional + name for name in keys_got_from(ascend, "additional_config")}
    known |= {f"{GRAPH}.{name}" for name in keys_got_from(ascend, "torchair_graph_config")}
    known |= {f"{additional}ascend_scheduler_config.{name}" for name in scheduler | {"enabled"}}
    return keys - known


def unread_by_the_overlay(keys: set[str]) -> set[str]:
    """Return the keys of the overlay's own node whose section or field no code uses."""
    # The hang detector reads the limits of a phase by the phase's name.
    used = attributes_of_the_overlay() | set(WATCHED_PHASES)
    # The engine reads the section of a feature whose switch is its field `enabled`.
    used |= {feature.section.rpartition(".")[2] for feature in FEATURES if feature.section and feature.can_be_off}
    return {key for key in keys if not set(key.split("overlay.")[1].split(".")) <= used}


def unread_by_the_transformer(keys: set[str]) -> set[str]:
    """Return the keys of override_transformer_config that are not fields of the training model's configuration."""
    from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig

    fields = {field.name for field in dataclasses.fields(DeepseekV3TransformerConfig)}
    return {key for key in keys if key.rpartition(".")[2] not in fields}


READERS = {
    ENGINE: unread_by_the_engine,
    "actor_rollout_ref.overlay": unread_by_the_overlay,
    TRANSFORMER: unread_by_the_transformer,
}


@pytest.mark.parametrize("node", READERS)
def test_keys_that_are_handed_over_have_a_reader(node):
    keys = {key for file in FILES for key in keys_of(file) if key.startswith(f"{node}.")}
    assert keys and not READERS[node](keys)
    nonsense = f"{node}.no_such_key"
    assert READERS[node](keys | {nonsense}) == {nonsense}


def referenced() -> set[str]:
    """Return the keys to which verl's or our files refer by interpolation."""
    verl = Path(find_spec("verl").submodule_search_locations[0]) / "trainer" / "config" / "ppo_megatron_trainer.yaml"
    texts = [verl.read_text(), *(path.read_text() for path in CONFIG_FOLDER.rglob("*.yaml"))]
    return set(re.findall(r"\$\{([\w.]+)\}", "\n".join(texts)))


def unread(keys: set[str], records: Path) -> set[str]:
    """Return the keys outside `READERS` that no process of a run read; our own checks do not count as readers."""
    checks = ("configuration_checks/", "onpolicy/conditions.py")
    lines = [line.split("\t") for path in records.glob("*.tsv") for line in path.read_text().splitlines()]
    read = {key for key, reader in lines if not any(check in reader for check in checks)}
    handed_over = {key for key in keys if key.startswith(tuple(f"{node}." for node in READERS))}
    return keys - read - handed_over - referenced()


def planned_peaks(job: str, checkpoint: Path) -> dict[str, int]:
    """Return the device memory by phase that scripts/plan.py computes for the scaled job."""
    from post_training.plan.job import read_job
    from post_training.plan.report import Machine, make_job_plan

    overrides = [MODEL, "+scale=emulated_8_dies", "actor_rollout_ref.overlay.precision=bfloat16"]
    config = OmegaConf.to_container(compose(job, overrides), resolve=True)
    plan = make_job_plan(read_job(config, json.loads((checkpoint / "config.json").read_text())), Machine(512 << 20))
    return plan.device.phases


@pytest.fixture(scope="module")
def weights(mla_inputs, tmp_path_factory) -> Path:
    """Prepare a checkpoint in the published format for training as the guide says."""
    folder = tmp_path_factory.mktemp("weights")
    return cast(write_published(mla_inputs[0], folder / "fp8"), folder / "bf16")


@pytest.fixture(scope="module")
def scaled_run(weights, mla_inputs, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Return the folder and the steps of the scaled job with real weights."""
    folder = tmp_path_factory.mktemp("scaled")
    (folder / "reads").mkdir()
    recording = {
        "PYTHONPATH": str(Path(__file__).parent / "record_reads"),
        "CONFIGURATION_READS": str(folder / "reads"),
    }
    steps = f"trainer.total_training_steps={STEPS}"
    return folder, run_scaled_job(TRUE, folder, weights, mla_inputs[1], steps, **recording)


@pytest.mark.slow
def test_the_scaled_job_is_exact_and_reads_every_key(scaled_run):
    folder, steps = scaled_run
    assert_exact(steps, STEPS)
    assert_left_the_reference(steps)
    assert ran_graphs(folder)
    # Samples stay on the devices, and engines agree per window; lengths are too alike for requests to migrate.
    for step in steps:
        assert step["samples/collectives"] == 1 and "rollout/moved_requests" in step
        assert step["rollout/agreements"] < step["rollout/decode_steps"] + step["rollout/prefill_steps"]
    keys = {key for file in FILES for key in keys_of(file)}
    # These are read only with DAPO or a critic, which this job does not have.
    others = ("algorithm.filter_groups.", "reward_model.overlong_buffer.", "critic.")
    keys = {key for key in keys if not key.startswith(others)}
    # The driver reads the keys that its features declare outside actor_rollout_ref from the resolved configuration.
    keys -= {key.path for feature in FEATURES for key in feature.keys if not key.path.startswith("actor_rollout_ref.")}
    assert unread(keys, folder / "reads") == set()
    # Keys that verl 0.4.0 does not read on Megatron are detected.
    never_read = {
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    }
    assert unread(keys | never_read, folder / "reads") == never_read


def first_answers(run: Path) -> Counter[tuple[str, str]]:
    """Return the prompts and answers of a run's first step."""
    rows = map(json.loads, (run / "answers" / "1.jsonl").read_text().splitlines())
    return Counter((row["input"], row["output"]) for row in rows)


def slot_steps_bound(steps: list[dict[str, float]]) -> float:
    return sum(step["rollout/slot_steps_bound"] for step in steps)


@pytest.mark.exhaustive
def test_only_requests_that_change_engines_may_answer_otherwise(mla_inputs, tmp_path):
    """Answers have all kinds of lengths here, because the end token is likelier at some positions.

    The new engine computes a request's tokens again, all at once, which in bfloat16 rounds differently. In float32,
    which the graphs of DeepSeek-V3 do not take, tokens are equal (test_engines.py of rollout_rebalance).
    """
    model = shutil.copytree(mla_inputs[0], tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    end = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    weights["lm_head.weight"][end] *= 8
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    # One instance of eight engines, and an update too small to change the lengths.
    given = (
        "data.max_response_length=32", f"{GRAPH}.graph_batch_sizes=[1,2,3,4]", f"{ENGINE}.max_num_seqs=4",
        "rollout_instance.half_of_the_dies=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.optim.lr=1e-6",
    )  # fmt: skip
    runs = []
    for moves in ("true", "false"):
        (run := tmp_path / moves).mkdir()
        enabled = f"actor_rollout_ref.overlay.rollout_rebalance.enabled={moves}"
        answers = f"+trainer.rollout_data_dir={run}/answers"
        runs.append(run_scaled_job(TRUE, run, model, mla_inputs[1], *given, enabled, answers))
        assert_exact(runs[-1], 3)
    moved, stayed = runs
    slots = [sum(step["rollout/slot_steps"] for step in run) for run in runs]
    print([step["rollout/moved_requests"] for step in moved], slots, bound := slot_steps_bound(moved))
    assert min(step["rollout/moved_requests"] for step in moved) >= 2 and "rollout/moved_requests" not in stayed[0]
    assert bound <= slots[0] < 0.9 * slots[1]
    first, second = (first_answers(tmp_path / moves) for moves in ("true", "false"))
    assert first.total() == second.total() == 32
    assert (first - second).total() <= moved[0]["rollout/moved_requests"]


@pytest.mark.slow
def test_the_workers_print_the_first_step_that_the_guide_shows(scaled_run):
    said = (scaled_run[0] / "output").read_text()
    of_workers = lines_of_a_first_step()[3:]  # the first three are the launcher's
    assert len(of_workers) == 4 and [pattern.pattern for pattern in of_workers if not pattern.search(said)] == []
    assert not of_workers[-1].search(said.replace("patches_ineffective", "patches"))


@pytest.mark.slow
def test_the_plan_predicts_the_memory_of_the_scaled_job(scaled_run, weights):
    predicted, last = planned_peaks(TRUE, weights), scaled_run[1][-1]
    measured = {phase: last[f"memory/peak_bytes/{phase}"] for phase in predicted}
    # In bfloat16 the reference's pass holds 1.6 MB more than planned, a tenth of what so small a model takes.
    within = {phase: 0.12 if phase == "ref" else 0.1 for phase in measured}
    assert predicted == {phase: pytest.approx(peak, rel=within[phase]) for phase, peak in measured.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("job", "graph"), [(RANDOM, True), (RANDOM, False), (TRUE, False)])
def test_the_other_scaled_jobs_are_exact(job, graph, mla_inputs, tmp_path):
    """Random weights come from verl's own initialization; the model's folder has none."""
    model = describe(mla_inputs[0], tmp_path / "model") if job == RANDOM else mla_inputs[0]
    (run := tmp_path / "run").mkdir()
    # With forced balancing, training and rollout choose different experts in their batches, so log-probs would differ.
    routed = ("actor_rollout_ref.overlay.router_balance.forced=false",)
    metrics = run_scaled_job(job, run, model, mla_inputs[1], *routed, *(() if graph else ("+graph=off",)))
    assert_exact(metrics, 3, in_float32=not graph)
    if job == TRUE:
        assert_left_the_reference(metrics)
    else:  # the reference has random weights of its own
        assert len({step["actor/kl_loss"] for step in metrics}) == 3
        assert all(step["actor/grad_norm"] > 1e-3 for step in metrics)
    assert ran_graphs(run) == graph


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", [DAPO, QWEN_DAPO])
def test_the_scaled_jobs_with_dapo_are_exact_and_train_on_groups_that_differ(job, mla_inputs, tmp_path):
    model = mla_inputs[0]
    if job == QWEN_DAPO:
        model, changes = tmp_path / "model", (("num_hidden_layers", 4),)
        data = ROOT / "data" / "arithmetic" / "train.jsonl"
        request = CheckpointRequest(data, 0, "float32", warm_start=None, model_type="qwen2", changes=changes)
        make_checkpoint(request, model, lambda step, loss: None)
    (run := tmp_path / "run").mkdir()
    metrics = run_scaled_job(job, run, model, mla_inputs[1], "trainer.val_before_train=false")
    shown = ("sampling/generated_prompts", "sampling/gen_batches", "actor/pg_clipfrac", "critic/score/mean")
    print(job, [{name: step[name] for name in shown} for step in metrics])
    assert_exact(metrics, 3, in_float32=job == QWEN_DAPO)
    for step in metrics:
        assert step["sampling/groups_with_gradient"] == 1 and step["sampling/trained_prompts"] == 8
        assert step["actor/grad_norm"] > 0 and not step["actor/nonfinite_steps"]
    assert sum(step["sampling/generated_prompts"] for step in metrics) > 24
    assert ran_graphs(run) == (job == DAPO)


@pytest.mark.slow
def test_the_benchmark_job_balances_experts_and_ends_no_response_early(mla_inputs, tmp_path):
    """On two dies, rollout graphs and training use the balanced router, and responses run to their maximum length."""
    model = describe(mla_inputs[0], tmp_path / "model")
    (run := tmp_path / "run").mkdir()
    metrics = run_scaled_job(RANDOM, run, model, mla_inputs[1], *TWO_DIES, "rollout_instance.all_dies=2", dies=2)
    assert ran_graphs(run) and len(metrics) == 2
    assert {each for each in executed(run) if each.endswith("@router_balance")} == {
        "verl.models.mcore.registry:hf_to_mcore_config@router_balance",
        "vllm_ascend.ops.fused_moe:AscendUnquantizedFusedMoEMethod.__init__@router_balance",
    }
    for step in metrics:
        assert step["reshard/weights_exact"] == 1 and step["overlay/patches_ineffective"] == 0
        assert step["training/rollout_logprob_diff_max"] > 1e-3
        # A response with the end token among its tokens continues in the engine, and verl masks the rest.
        assert step["response_length/clip_ratio"] > 0.9 and step["response_length/max"] == 10
    told = read_run(run)
    assert told.conditions == "random weights, ignore_eos, experts balanced by force, no layer recomputed"
    assert told.dies == 2 and told.statistics.sequences == 32 and told.model["n_routed_experts"] == 256
    assert sum(told.statistics.seconds.values()) + told.statistics.aside == pytest.approx(told.statistics.total)
