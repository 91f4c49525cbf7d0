"""Types and ranges: generated bad values, verl's own file, and the message for each kind of error."""

from __future__ import annotations

import copy
import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, reduce
from importlib.util import find_spec
from itertools import cycle
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError

from overlay import ConfigurationError, SettingsError
from rehearsal.plan import Options, make_plan
from rehearsal.tiny_model.architecture import TINY_MODELS
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.configuration_checks.backends import SCHEMAS, backend_of
from verl_patches.trainer.configuration_checks.names import ELSEWHERE, RENAMED, known_keys, nearest, schema_keys
from verl_patches.trainer.configuration_checks.schema import field_at, group_of
from verl_patches.trainer.configuration_checks.values import check_values, resolved
from verl_patches.trainer.main_ppo import CONFIG_FOLDER, compose, main

CONFIGURATIONS = (
    "rehearsal",
    "deepseek_v3_256die_random_init",
    "deepseek_v3_256die_true_weight",
    "qwen2_5_0_5b_gsm8k",
    "qwen2_5_1_5b_math_one_card",
)
VERLS_FILES = {"rehearsal": "ppo_megatron_trainer.yaml", "qwen2_5_0_5b_gsm8k": "ppo_trainer.yaml"}
MODEL = "actor_rollout_ref.model.path=/weights"
# Values of every kind; most of them are invalid for most keys.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["abc", "null", "-1", "0x10", "1e3", "True", "", "gae", "fsdp", "cuda"]),
    st.lists(st.one_of(st.integers(-2, 9), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.sampled_from(["a", "enable", "seed"]), st.integers(), max_size=2),
)


@cache
def composed(name: str) -> DictConfig:
    return compose(name, [MODEL])


@cache
def values_of(name: str) -> dict[str, Any]:
    return resolved(composed(name))


@cache
def leaves(name: str) -> tuple[str, ...]:
    """Return every key of a composed configuration, including groups."""

    def below(node: Any, prefix: str) -> list[str]:
        found = []
        for key, value in node.items() if isinstance(node, dict) else ():
            found += [prefix + key, *below(value, f"{prefix}{key}.")]
        return found

    return tuple(below(values_of(name), ""))


def outcome(name: str, key: str, value: Any) -> str:
    """Return the message of the checks for a configuration with one changed value, or "" if it passes."""
    config = copy.deepcopy(values_of(name))
    *groups, last = key.split(".")
    reduce(getitem, groups, config)[last] = value
    try:
        check_configuration(config)
    except (ConfigurationError, SettingsError) as error:
        return str(error)
    return ""


def assert_is_one_sentence(said: str) -> None:
    assert said and "\n" not in said and said.isprintable(), said


@pytest.mark.parametrize("name", CONFIGURATIONS)
@seed(12)
@settings(max_examples=150, database=None)
@given(data=st.data())
def test_any_value_of_any_key_is_one_sentence_or_runs(name, data):
    key = data.draw(st.sampled_from(leaves(name)))
    said = outcome(name, key, data.draw(VALUES))
    if said:
        assert_is_one_sentence(said)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_value_of_another_type_rejected_by_its_key(name):
    """Every key is tried except `model_config`, which is the model's own; the overlay's settings name their keys."""
    schema = SCHEMAS[backend_of(composed(name))]
    typed = [key for key in leaves(name) if field_at(key.split("."), schema) is not None]
    typed = [key for key in typed if not key.endswith(("model_config", "model.override_config"))]
    assert len(typed) > 180
    for key in typed:
        said = outcome(name, key, {"no": {"such": "value"}})
        assert_is_one_sentence(said)
        assert key in said or "unknown key" in said or "refers to a value" in said


def assert_ends_with_two_and_one_line_or_zero(override: str) -> None:
    printed, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        code = main(["--print-config", MODEL, override])
    said = errors.getvalue()
    assert code in (0, 2) and said.count("\n") == (1 if code else 0), (override, said)
    assert code == 0 or (said.startswith("error: ") and not printed.getvalue()), override


@seed(14)
@settings(max_examples=25, database=None)
@given(data=st.data())
def test_any_override_of_the_command_line_ends_with_two_and_one_line_or_zero(data):
    key = data.draw(st.sampled_from(leaves(CONFIGURATIONS[0])))
    sign = data.draw(st.sampled_from(["", "+", "++", "~"]))
    text = data.draw(
        st.sampled_from(["abc", "-7", "nan", "null", "1e400", "[1,", "{a:1}", "'x", "${nosuch.key}", "", "0.5"])
    )
    assert_ends_with_two_and_one_line_or_zero(f"{sign}{key}" + ("" if sign == "~" else f"={text}"))


def test_a_single_value_in_place_of_any_group_ends_with_two_and_one_line_or_zero():
    """Some code reads below a group before its type is checked."""
    name = CONFIGURATIONS[0]
    groups = [key for key in leaves(name) if isinstance(reduce(getitem, key.split("."), values_of(name)), dict)]
    assert len(groups) > 60
    for key, value in zip(groups, cycle(("abc", "''", "0", "[a]"))):
        assert_ends_with_two_and_one_line_or_zero(f"{key}={value}")
    assert_ends_with_two_and_one_line_or_zero("actor_rollout_ref.ref.megatron=abc")
    assert_ends_with_two_and_one_line_or_zero("actor_rollout_ref.overlay.measure=''")


@seed(15)
@settings(max_examples=80, database=None)
@given(data=st.data())
def test_a_key_with_a_typo_rejected_with_the_key_that_was_meant(data):
    key = data.draw(st.sampled_from(sorted(key for key in known_keys() if len(key.rpartition(".")[2]) > 5)))
    parent, _, name = key.rpartition(".")
    place = data.draw(st.integers(1, len(name) - 2))
    misspelt = f"{parent}.{name[:place]}{name[place + 1 :]}".lstrip(".")
    if misspelt in known_keys():
        return
    meant = nearest(misspelt, known_keys())
    assert meant is not None and meant.rpartition(".")[0] == parent


def test_a_sibling_is_meant_before_a_key_of_the_same_name_elsewhere():
    assert nearest("alpha.lrr", ["alpha.lr", "beta.lrr"]) == "alpha.lr"
    assert nearest("alpha.lrr", ["alpha.unlike", "beta.lrr"]) == "beta.lrr"


OVERLAY = "actor_rollout_ref.overlay"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        (f"{OVERLAY}.watch.warn_s.updat", f"{OVERLAY}.watch.warn_s.update"),
        ("overlay.watch.warn_s.updat", f"{OVERLAY}.watch.warn_s.update"),
        (f"{OVERLAY}.wacth.enabled", f"{OVERLAY}.watch.enabled"),
        (f"{OVERLAY}.residensy", f"{OVERLAY}.residency"),
        (f"{OVERLAY}.reshard.bucket_byte", f"{OVERLAY}.reshard.bucket_bytes"),
        ("actor_rollout_ref.precision", f"{OVERLAY}.precision"),
    ],
)
def test_a_misspelt_key_of_the_overlay_is_answered_with_one_of_its_own(key, meant, capsys):
    assert main(["--print-config", MODEL, f"{key}=1"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: unknown key {key}, which nothing reads; did you mean {meant}?\n"


def test_every_key_of_the_overlay_that_the_configurations_set_is_known():
    keys = {key for name in CONFIGURATIONS for key in leaves(name) if key.startswith(f"{OVERLAY}.")}
    assert len(keys) > 5 and keys <= known_keys()
    # Keys that are next to verl's own keys are not keys of the overlay.
    assert f"{OVERLAY}.recompute_old_log_prob" not in known_keys() and not schema_keys() & keys


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_configurations_themselves_pass(name):
    check_configuration(composed(name))


@pytest.mark.parametrize("name", VERLS_FILES)
def test_every_key_of_verls_own_file_is_in_the_schema(name):
    file = Path(find_spec("verl").submodule_search_locations[0]) / "trainer" / "config" / VERLS_FILES[name]
    keys, schema = set(OmegaConf.to_container(OmegaConf.load(file))), SCHEMAS[backend_of(composed(name))]
    below = {key for key in leaves(name) if key.partition(".")[0] in keys}
    free = ["actor_rollout_ref.overlay.", "actor_rollout_ref.rollout.engine_kwargs.sglang."]
    free += ["reward_model.model.fsdp_config."] if schema is SCHEMAS["fsdp"] else []
    assert {
        key for key in below if field_at(key.split("."), schema) is None and not key.startswith(tuple(free))
    } == set()


def test_every_key_that_our_files_set_is_in_the_schema():
    def below(node: Any, prefix: str = "") -> list[str]:
        return [
            name
            for key, value in node.items()
            for name in (below(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key])
        ]

    for file in CONFIG_FOLDER.rglob("*.yaml"):
        values = OmegaConf.to_container(OmegaConf.load(file))
        values.pop("defaults", None)
        places = [key.split(".") for key in below(values)]
        unknown = {
            ".".join(place) for place in places if all(field_at(place, each) is None for each in SCHEMAS.values())
        }
        # The arguments of a reward function are checked against that function.
        free = ("actor_rollout_ref.overlay.", "custom_reward_function.reward_kwargs.")
        assert {key for key in unknown if not key.startswith(free)} == set()


# Defaults that switch something on or give a size; every other default is null, off or empty.
DEFAULTS = {
    "data.seed": 1,
    "data.dataloader_num_workers": 8,
    "data.cache_dir": "~/.cache/verl/rlhf",
    "data.filter_prompts": True,
    "data.image_key": "images",
    "data.video_key": "videos",
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "actor.recompute_old_log_prob": True,
    "ppo_max_token_len_per_gpu": {"actor": 16384, "critic": 32768},
    "log_prob_max_token_len_per_gpu": 16384,
    "forward_max_token_len_per_gpu": 32768,
    "optim.lr_warmup_steps": -1,
    "optim.num_cycles": 0.5,
    "fsdp_config.reshard_after_forward": True,
    "fsdp_config.fsdp_size": -1,
    "mixed_precision.param_dtype": "bf16",
    "mixed_precision.reduce_dtype": "fp32",
    "mixed_precision.buffer_dtype": "fp32",
    "ulysses_sequence_parallel_size": 1,
    "torchair_graph_config.enable_view_optimize": True,
    "ascend_scheduler_config.policy": "fcfs",
    "additional_config.num_iterations_eplb_update": 400,
    "additional_config.num_wait_worker_iterations": 30,
    "additional_config.lmhead_tp_size": -1,
    "kl_ctrl.horizon": 10000,
    "kl_ctrl.target_kl": 0.1,
    "filter_groups.on_exhausted": "fail",
}


def defaults_of(schema: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the schema's default of every key that a configuration may omit."""
    found = {}
    for name, field in schema.model_fields.items():
        key = prefix + (field.alias or name)
        if not field.is_required():
            found[key] = field.default
        if group := group_of(field):
            found |= defaults_of(group, f"{key}.")
    return found


@pytest.mark.parametrize("name", VERLS_FILES)
def test_omitted_values_match_verls_defaults(name):
    """verl's own file has most values. Null stands for a group that the file may have and the schema leaves out."""
    defaults = defaults_of(SCHEMAS[backend_of(composed(name))])
    for key, value in defaults.items():
        expected = next((DEFAULTS[end] for end in DEFAULTS if f".{key}".endswith(f".{end}")), None)
        if isinstance(expected, dict):
            expected = next(size for group, size in expected.items() if group in key)
        assert value == expected if expected is not None else not value, key
    file = Path(find_spec("verl").submodule_search_locations[0]) / "trainer" / "config" / VERLS_FILES[name]
    own = OmegaConf.load(file)
    written = {key: OmegaConf.select(own, key, throw_on_resolution_failure=False) for key in defaults}
    single = {key: value for key, value in written.items() if isinstance(value, int | float | str)}
    assert len(single) > 10
    referred = ("use_dynamic_bsz", "max_token_len_per_gpu")
    assert {key: defaults[key] for key in single if not key.endswith(referred)} == {
        key: value for key, value in single.items() if not key.endswith(referred)
    }


LARGEST, RAYS_SMALLEST = 2**31 - 1, 75 * 2**20
MEGATRON_BOUNDS = {
    "data.max_prompt_length": ([1, LARGEST], [0, LARGEST + 1, 1.0, "3", True, None]),
    "data.val_batch_size": ([1, None], [0]),
    "data.seed": ([0, LARGEST], [-1, LARGEST + 1]),
    "data.dataloader_num_workers": ([0, LARGEST], [-1, LARGEST + 1]),
    "data.train_files": (["a.parquet", ["a", "b"]], [[], [""]]),
    "data.prompt_key": (["x"], ["", None]),
    "trainer.save_freq": ([-1, LARGEST], [-2, LARGEST + 1]),
    "trainer.logger": (["console", ["wandb", "mlflow"]], ["comet"]),
    "ray_init.object_store_memory": ([RAYS_SMALLEST, None], [RAYS_SMALLEST - 1]),
    "actor_rollout_ref.actor.megatron.context_parallel_size": ([1], [0, 2]),
    "actor_rollout_ref.actor.optim.lr": ([0.0, 3], [-1e-9, math.nan, math.inf, "1e-6"]),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ([-1, LARGEST], [-2, LARGEST + 1]),
    "actor_rollout_ref.actor.optim.total_training_steps": ([-1, LARGEST], [-2, LARGEST + 1]),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": ([0.0, 1.0], [-1e-9, 1.001]),
    "actor_rollout_ref.actor.clip_ratio_c": ([1.001, 3], [1.0]),
    "actor_rollout_ref.actor.profile.step_start": ([-1], [-2]),
    "actor_rollout_ref.actor.profile.step_end": ([-1], [-2]),
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": (["None", None, 1], ["two", 0]),
    "actor_rollout_ref.rollout.top_k": ([-1, LARGEST], [-2, LARGEST + 1]),
    "actor_rollout_ref.rollout.top_p": ([1e-9, 1.0], [0.0, 1.001]),
    "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.lmhead_tp_size": ([-1], [-2]),
    "algorithm.kl_ctrl.target_kl": ([1e-9], [0.0]),
}
FSDP_BOUNDS = {
    "actor_rollout_ref.actor.grad_clip": ([1e-9], [0.0]),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ([-1], [-2]),
    "actor_rollout_ref.actor.optim.total_training_steps": ([-1], [-2]),
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params": ([0], [-1]),
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": ([-1], [0, 1, 2]),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": ([1, 2], [0]),
    "critic.ulysses_sequence_parallel_size": ([1], [0, 2]),
    "actor_rollout_ref.model.lora_rank": ([0], [1, -1]),
    "actor_rollout_ref.model.use_liger": ([False], [True]),
    "critic.grad_clip": ([1e-9], [0.0]),
    "reward_model.model.fsdp_config.fsdp_size": ([-1, 8], [-2]),
}


@pytest.mark.parametrize(
    ("backend", "key", "sound", "wrong"),
    [("megatron", key, *both) for key, both in MEGATRON_BOUNDS.items()]
    + [("fsdp", key, *both) for key, both in FSDP_BOUNDS.items()],
)
def test_a_range_ends_where_it_says(backend, key, sound, wrong):
    *groups, name = key.split(".")
    group = group_of(field_at(groups, SCHEMAS[backend]))

    def errors(value: Any) -> list[Any]:
        try:
            group.model_validate({name: value})
        except ValidationError as error:
            return [each for each in error.errors() if each["loc"][0] == name]
        return []

    assert [value for value in sound if errors(value)] == [] and [value for value in wrong if not errors(value)] == []


# Each of these values was once accepted or ended in a traceback.
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.n_gpus_per_node=abc", "trainer.n_gpus_per_node=abc is invalid: it should be a valid integer"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node=0 is invalid: it should be greater than or equal to 1"),
        ("trainer.save_freq=abc", "trainer.save_freq=abc is invalid: .*; set it to a number of steps, or -1 for never"),
        ("trainer.save_freq=null", "trainer.save_freq=null is invalid"),
        ("ray_init.num_cpus=abc", "ray_init.num_cpus=abc is invalid"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=0", "tensor_model_parallel_size=0 is invalid"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=two", "model_parallel_size=two is invalid"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=null", "model_parallel_size=null is invalid"),
        ("data.train_batch_size=0", "data.train_batch_size=0 is invalid"),
        ("data.train_batch_size=many", "data.train_batch_size=many is invalid"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "ppo_mini_batch_size=0 is invalid"),
        ("trainer.project_name=${nosuch.key}", "trainer.project_name refers .*'nosuch.key' not found"),
        ("~actor_rollout_ref.overlay", "actor_rollout_ref.overlay was removed"),
        ("~trainer.nnodes", "trainer.nnodes was removed"),
        ("actor_rollout_ref=null", "actor_rollout_ref=null is invalid: it should be a group of keys"),
        ("actor_rollout_ref.actor.optim.lr=abc", "optim.lr=abc is invalid: it should be a valid number"),
        ("actor_rollout_ref.actor.optim.lr=-1", "optim.lr=-1 is invalid: it should be greater than or equal to 0"),
        ("actor_rollout_ref.actor.optim.lr=nan", "optim.lr=NaN is invalid: it should be a finite number"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=-64", "ppo_micro_batch_size_per_gpu=-64 is invalid"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=5", "gpu_memory_utilization=5 is invalid"),
        ("trainer.nnodes=2", "trainer.nnodes=2 needs a Ray of 2 nodes, but ray_init.address=local"),
        ("ray_init.address=head", "ray_init.address=head is invalid. Set it to host:port"),
        *(
            (f"ray_init.address={each}", "is invalid. Set it to host:port")
            for each in (":6379", "a:b", "a:0", "a:65536")
        ),
        ("ray_init.temp_dir=/tmp/0123456789/0123456789/0123456789/0123456789", "ray_init.temp_dir=.* shorter one"),
        ("algorithm.adv_estimator=foo", "adv_estimator=foo is invalid: it should be 'grpo'"),
        ("+data.filter_groups.enable=True", "data.filter_groups is called algorithm.filter_groups"),
        ("reward_model.enable=True", "reward_model.enable=true is invalid: .*a reward model is not supported yet"),
        ("actor_rollout_ref.actor.strategy=fsdp", "strategy=fsdp is invalid: it should be 'megatron'; .* Megatron"),
        (
            "+actor_rollout_ref.actor.fsdp_config.param_offload=True",
            "actor.fsdp_config.param_offload, .*: it belongs to FSDP",
        ),
        ("actor_rollout_ref.actor.profile.use_profile=True", "use_profile=true is invalid: .*records only CUDA"),
        ("+trainer.savefreq=5", "unknown key trainer.savefreq, which nothing reads; did you mean trainer.save_freq?"),
        ("trainer.logger=[console,foo]", "trainer.logger.1=foo is invalid: it should be 'console'"),
        ("trainer.resume_mode=resume_path", "resume_mode=resume_path needs trainer.resume_from_path"),
        ("trainer.resume_from_path=global_step_2", "has no effect with trainer.resume_mode=disable"),
        ("trainer.del_local_ckpt_after_load=true", "del_local_ckpt_after_load=true is invalid: .*is kept until"),
        ("trainer.default_hdfs_dir=hdfs://a", "default_hdfs_dir=.* is invalid: .*only .*default_local_dir; remove it$"),
        ("actor_rollout_ref.rollout.top_k=-2", "top_k=-2 is invalid: .*a number of tokens, or -1 for all"),
        ("actor_rollout_ref.actor.checkpoint.contents=[model]", "is invalid: a checkpoint has other contents"),
        ("data.train_files=[]", "data.train_files=.* is invalid: it should have at least 1 item"),
        ("+ray_init.port=6379", "unknown key ray_init.port, which nothing reads"),
    ],
)
def test_values_that_were_accepted_or_ended_in_a_traceback_are_one_sentence(override, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_configuration(compose("rehearsal", [override]))
    assert_is_one_sentence(str(caught.value))


GAE = "+recipe=ppo"


def test_a_critic_has_the_actors_layout_and_micro_batches():
    check_configuration(compose("rehearsal", [GAE]))
    critic = resolved(compose("rehearsal", [GAE]))["critic"]
    assert critic["megatron"]["pipeline_model_parallel_size"] == 2 and critic["ppo_micro_batch_size_per_gpu"] == 64
    (recipe,) = [each for each in make_plan(Options(recipe="ppo"), "time").overrides if each.startswith("+recipe=")]
    check_configuration(compose("rehearsal", [recipe, "trainer.critic_warmup=2", "algorithm.overlong_filtering=true"]))
    assert compose("rehearsal", [recipe]).algorithm.adv_estimator == "gae"
    dynamic = [f"actor_rollout_ref.actor.{each}" for each in ("use_dynamic_bsz=true", "ppo_max_token_len_per_gpu=20")]
    check_configuration(compose("rehearsal", [GAE, *dynamic]))  # here a limit below a sequence only leaves it alone


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "critic.megatron.tensor_model_parallel_size=1",
            "tensor_model_parallel_size=1 is invalid: the critic trains in the actor's parallel groups. Set it to 2",
        ),
        (
            "critic.megatron.pipeline_model_parallel_size=4",
            "pipeline_model_parallel_size=4 is invalid: the critic trains in the actor's parallel groups. Set it to 2",
        ),
        ("critic.megatron.use_dist_checkpointing=true", "a critic begins from a HuggingFace folder"),
        (
            "critic.use_dynamic_bsz=true",
            "critic.use_dynamic_bsz=True is invalid: .*the actor's value .* Set it to false",
        ),
        ("critic.megatron.optimizer_offload=true", "critic.megatron.optimizer_offload=True and .*residency.enabled"),
        ("critic.ppo_micro_batch_size_per_gpu=24", "critic.ppo_micro_batch_size_per_gpu=24 does not divide the 256"),
        ("critic.model.path=null", "critic.model.path is not set"),
        ("actor_rollout_ref.overlay.mindspeed.engine=on", "is not tested with MindSpeed-LLM. Set .*engine=off"),
    ],
)
def test_a_critic_that_cannot_run_on_megatron_is_one_sentence(override, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_configuration(compose("rehearsal", [GAE, override]))
    assert_is_one_sentence(str(caught.value))


def test_number_of_a_critics_checkpoints_rejected_where_there_is_one():
    with pytest.raises(
        ConfigurationError, match="has actor and critic and is kept as a whole; set .*overlay.checkpoint"
    ):
        check_configuration(compose("rehearsal", [GAE, "trainer.max_critic_ckpt_to_keep=2"]))


def test_a_critic_needs_a_folder_with_weights(tmp_path):
    critic = {"model_type": "deepseek_v3", **TINY_MODELS["deepseek_v3"]}
    (tmp_path / "config.json").write_text(json.dumps(critic))
    with pytest.raises(ConfigurationError, match="has a config.json but no weights. Set it to the folder") as caught:
        check_configuration(compose("rehearsal", [GAE, f"critic.model.path={tmp_path}"]))
    assert_is_one_sentence(str(caught.value))
    check_configuration(compose("rehearsal", [GAE, f"critic.model.path={tmp_path}", "critic.load_weight=false"]))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.clip_ratio_low=0.2", "write actor_rollout_ref.actor.clip_ratio_low=0.2"),
        ("algorithm.clip_ratio_high=0.28", "write actor_rollout_ref.actor.clip_ratio_high=0.28"),
        ("algorithm.use_token_level_loss=true", "write actor_rollout_ref.actor.loss_agg_mode=token-mean"),
        ("algorithm.use_token_level_loss=false", "write actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"),
        ("overlong_buffer.len=4096", "overlong_buffer is called reward_model.overlong_buffer"),
        ("algorithm.overlong_buffer.len=4096", "algorithm.overlong_buffer is called reward_model.overlong_buffer"),
        (
            "actor_rollout_ref.model.ulysses_sequence_parallel_size=2",
            "size is called actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        ),
        ("hardware.gpus_per_node=8", "write trainer.n_gpus_per_node=8"),
        ("hardware.total_nodes=12", "write trainer.nnodes=12"),
        ("parallelism.tensor_parallelism=8", "write actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8"),
        ("parallelism.pipeline_parallelism=6", "write .*megatron.pipeline_model_parallel_size=6"),
        ("parallelism.data_parallelism=2", "data_parallelism follows from the dies and the other sizes"),
        ("memory_config.gradient_checkpointing=true", "write .*model.enable_gradient_checkpointing=true"),
        ("performance.torch_compile=true", "write actor_rollout_ref.actor.use_torch_compile=true"),
        ("retry_options.max_retry_times=5", "retry_options belongs in the policy file of scripts/supervise.py"),
        ("monitoring_config.alerting.threshold.memory_usage=0.9", "has reward_score, .*write a rule in .*alerts.rules"),
        ("global_profiler.steps=[1,5,10]", r"is called .*profile.steps; .*overlay.profile.steps=\[1, 5, 10\]"),
        ("global_profiler.global_tool_config.nsys.duration=300", "remove it and set actor_rollout_ref.overlay.profile"),
    ],
)
def test_keys_of_guides_to_verl_rejected_with_the_right_key_and_value(override, says):
    values = OmegaConf.merge(resolved(composed("rehearsal")), OmegaConf.from_dotlist([override]))
    with pytest.raises(ConfigurationError, match=says) as caught:
        check_values(resolved(values))
    assert str(caught.value).startswith(f"unknown key {override.split('=')[0]}, which nothing reads: ")
    assert_is_one_sentence(str(caught.value))


def test_a_misspelt_key_is_named_before_a_wrong_value():
    with pytest.raises(ConfigurationError, match="unknown key trainer.savefreq"):
        check_configuration(compose("rehearsal", ["+trainer.savefreq=5", "data.train_batch_size=0"]))


def test_references_are_followed_and_values_are_not_converted():
    config = {"a": "${b}", "b": 3}
    assert resolved(OmegaConf.create(config)) == {"a": 3, "b": 3} and resolved({"a": 1}) == {"a": 1}
    values = resolved(composed("rehearsal"))
    values["data"]["train_batch_size"] = "32"
    with pytest.raises(ConfigurationError, match="data.train_batch_size=32 is invalid"):
        check_values(values)
    values["data"]["train_batch_size"], values["actor_rollout_ref"]["actor"]["optim"]["lr"] = 32, math.inf
    with pytest.raises(ConfigurationError, match="finite"):
        check_values(values)


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_every_description_is_a_remedy(schema):
    for key in schema_keys(schema):
        field = field_at(key.split("."), schema)
        assert field is not None and not (field.description or "").endswith(".")
        assert field.description is None or group_of(field) is None


def test_a_key_of_a_guide_leads_to_a_key_that_there_is():
    known = known_keys() | set(ELSEWHERE)
    assert [name for name in RENAMED.values() if name not in known] == []
