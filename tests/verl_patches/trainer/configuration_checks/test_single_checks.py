"""Single checks on the few values that they read, at the limits of what they accept."""

from __future__ import annotations

import ast
import os
from types import SimpleNamespace

import pytest

from overlay import ConfigurationError
from post_training.chips import A2
from verl_patches.features.training_checkpoint.feature import CheckpointSettings
from verl_patches.trainer.configuration_checks import chip, critic, files, model
from verl_patches.trainer.configuration_checks.failures import describe_failure
from verl_patches.trainer.configuration_checks.fsdp import check_strategies, check_token_limits
from verl_patches.trainer.configuration_checks.rollout import check_lengths


def said(check, *arguments, **options) -> str:
    """Return the message with which a check rejects, or "" if it accepts."""
    try:
        check(*arguments, **options)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "longest, tokens, chunked, scheduler, sentence",
    [
        (None, 48, True, {}, ""),
        (None, 47, True, {}, "max_num_batched_tokens=47 is less than the 48 tokens"),
        (None, 47, False, {}, ""),
        (None, 47, False, {"enabled": False}, ""),
        (None, 47, False, {"enabled": True}, "max_num_batched_tokens=47 is less than the 48 tokens"),
        (None, 47, False, {"enabled": True, "enable_chunked_prefill": True}, ""),
        (64, 63, True, {}, "max_num_batched_tokens=63 is less than the 64 tokens"),
        (48, 48, True, {}, ""),
        (47, 48, True, {}, "max_model_len=47 is less than data.max_prompt_length=16"),
    ],
)
def test_longest_sequence_fits_into_engine_and_forward(longest, tokens, chunked, scheduler, sentence):
    engine = {"additional_config": {"ascend_scheduler_config": scheduler}}
    rollout = {"max_model_len": longest, "max_num_batched_tokens": tokens, "enable_chunked_prefill": chunked}
    node = {"rollout": rollout | {"engine_kwargs": {"vllm": engine}}}
    config = {"data": {"max_prompt_length": 16, "max_response_length": 32}, "actor_rollout_ref": node}
    assert sentence in said(check_lengths, config) and bool(sentence) == bool(said(check_lengths, config))


@pytest.mark.parametrize("dies, rejected", [(1, False), (2, True), (8, True), (16, False), (24, True)])
def test_experts_in_a_graph_lie_on_dies_that_the_exchange_takes(dies, rejected):
    graph = {"additional_config": {"torchair_graph_config": {"enabled": True}}}
    node = {"overlay": {"rollout": {"expert_parallel_size": dies}}, "rollout": {"engine_kwargs": {"vllm": graph}}}
    assert bool(said(chip.check_chip, {"actor_rollout_ref": node}, A2)) == rejected


@pytest.mark.parametrize(
    "text, given, taken",
    [
        ("def score(a, *, b): ...", {"a": 1, "b": 2}, True),
        ("def score(a, *, b): ...", {"c": 1}, False),
        ("def score(a, **more): ...", {"c": 1}, True),
        ("def score(a, *rest): ...", {"rest": 1}, False),
    ],
)
def test_arguments_of_a_reward_are_those_by_name(text, given, taken):
    (function,) = ast.parse(text).body
    assert bool(said(files._check_arguments, function, given)) != taken


@pytest.mark.parametrize(
    "given, taken",
    [
        ({}, True),
        ({"rule": "gsm8k", "time_limit_s": 1, "budget_s": 2.5, "workers": 1}, True),
        ({"workers": -1}, False),
        ({"workers": 100_000}, False),
        ({"budget_s": 0}, False),
        ({"time_limit_s": float("nan")}, False),
        ({"rule": "boxes"}, False),
    ],
)
def test_limits_of_our_rule_are_checked_before_the_run(given, taken):
    assert bool(said(files._check_our_rule, given)) != taken


@pytest.mark.parametrize("missing, rejected", [(os.W_OK, True), (os.X_OK, True), (os.R_OK, False)])
def test_shared_copies_need_a_folder_that_can_be_written_into(tmp_path, monkeypatch, missing, rejected):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & missing)
    config = {"actor_rollout_ref": {"model": {"use_shm": True}}, "data": {}}
    assert bool(said(files.check_shared_copy, config, tmp_path)) == rejected


BOUND = """
import a.b, c.d as e
from f import g, h as i
for j in k:
    with l as m:
        n: int = 1
def o(): ...
class P: ...
"""


def test_bound_names_are_those_that_a_module_has():
    assert files._bound_names(ast.parse(BOUND).body) == {"a", "e", "g", "i", "j", "m", "n", "o", "P"}


def fully_sharded(**changes):
    """Return values of an FSDP job with consistent strategies, with `changes`, whose names have `__` for dots."""
    node = {"wrap_policy": {"min_num_params": 0, "disable": False}, "mixed_precision": {"buffer_dtype": "fp32"}}
    config = {
        "algorithm": {"adv_estimator": "gae"},
        "critic": {"strategy": "fsdp2", "model": {"fsdp_config": dict(node)}},
        "actor_rollout_ref": {
            name: {"strategy": "fsdp2", "fsdp_config": dict(node)} for name in ("actor", "ref", "rollout")
        },
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        group = config
        for part in path:
            group = group[part]
        group[last] = value
    return config


@pytest.mark.parametrize("place", ["actor_rollout_ref__actor", "actor_rollout_ref__ref", "critic__model"])
@pytest.mark.parametrize(
    "group, value",
    [
        ("wrap_policy", {"min_num_params": 100}),
        ("wrap_policy", {"disable": True}),
        ("mixed_precision", {"buffer_dtype": "bf16"}),
    ],
)
def test_keys_unused_by_fsdp2_rejected_everywhere(place, group, value):
    assert said(check_strategies, fully_sharded()) == ""
    config = fully_sharded(**{f"{place}__fsdp_config__{group}": value})
    key = f"{place}.fsdp_config.{group}.{next(iter(value))}".replace("__", ".")
    assert said(check_strategies, config).startswith(f"{key}=")
    of_fsdp = {"actor_rollout_ref__actor__strategy": "fsdp", "actor_rollout_ref__ref__strategy": "fsdp"}
    config = fully_sharded(**{f"{place}__fsdp_config__{group}": value}, **of_fsdp, critic__strategy="fsdp")
    assert said(check_strategies, config) == ""


@pytest.mark.parametrize("name", ["actor_rollout_ref.ref", "critic"])
def test_strategies_are_the_actors(name):
    config = fully_sharded(**{f"{name.replace('.', '__')}__strategy": "fsdp"})
    assert said(check_strategies, config).startswith(
        f"{name}.strategy=fsdp is invalid: a job has one strategy. Set it to actor_rollout_ref.actor.strategy=fsdp2"
    )


@pytest.mark.parametrize("group", ["actor", "rollout", "ref"])
@pytest.mark.parametrize("sharing, least", [(1, 48), (2, 24), (5, 10)])
def test_token_limit_holds_the_longest_row(group, sharing, least):
    def checked(tokens, dynamic=True):
        limits = {"ppo_max_token_len_per_gpu": 48, "log_prob_max_token_len_per_gpu": 48}
        switches = {"use_dynamic_bsz": True, "log_prob_use_dynamic_bsz": True}
        node = {
            name: limits | switches | {"ulysses_sequence_parallel_size": sharing}
            for name in ("actor", "rollout", "ref")
        }
        node[group] |= dict.fromkeys(limits, tokens) | dict.fromkeys(switches, dynamic)
        data = {"max_prompt_length": 16, "max_response_length": 32}
        return said(check_token_limits, {"data": data, "actor_rollout_ref": node})

    assert checked(least) == "" == checked(1, dynamic=False)
    sentence = checked(least - 1)
    assert sentence.startswith(f"actor_rollout_ref.{group}.") and f"Set it to at least {least}" in sentence


@pytest.mark.parametrize("engine, there, rejected", [("on", False, True), ("auto", True, True), ("auto", False, False),
                                                      ("off", True, False), (None, True, True)])  # fmt: skip
def test_critic_is_not_trained_through_mindspeed(tmp_path, monkeypatch, engine, there, rejected):
    monkeypatch.setattr(critic, "is_importable", lambda: there)
    sizes = dict.fromkeys(critic._SIZES)
    actor = {"megatron": sizes, "use_dynamic_bsz": False}
    overlay = {} if engine is None else {"mindspeed": {"engine": engine}}
    own = {"megatron": sizes | {"use_dist_checkpointing": False}, "use_dynamic_bsz": False, "load_weight": True}
    config = {
        "critic": own | {"model": {"path": str(tmp_path)}},
        "actor_rollout_ref": {"actor": actor, "overlay": overlay},
    }
    assert ("is not tested with MindSpeed-LLM" in said(critic._check_megatron, config)) == rejected


@pytest.mark.parametrize("width, rejected", [(48, False), (47, True), (32, True)])
@pytest.mark.parametrize("name", ["ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"])
def test_critics_token_limit_holds_prompt_and_answer(name, width, rejected):
    config = {
        "critic": {"use_dynamic_bsz": True, name: width},
        "data": {"max_prompt_length": 16, "max_response_length": 32},
    }
    assert bool(said(critic._check_tokens, config)) == rejected
    assert said(critic._check_tokens, config | {"critic": {"use_dynamic_bsz": False, name: width}}) == ""


@pytest.mark.parametrize(
    "path, asked", [("/actor", ["actor"]), ("/other", ["actor", "critic"]), (None, ["actor"]), ("/absent", ["actor"])]
)
def test_critics_model_is_trained_and_not_served(monkeypatch, path, asked):
    uses = []

    def model_findings(values, use):
        uses.append((values["name"], use.serves, use.dies))
        return []

    monkeypatch.setattr(model, "model_findings", model_findings)
    monkeypatch.setattr(model, "described", {"/actor": {"name": "actor"}, "/other": {"name": "critic"}}.get)
    monkeypatch.setattr(model, "backend_of", lambda config: "megatron")
    monkeypatch.setattr(model, "number_of_dies", lambda config: 8)
    config = {
        "actor_rollout_ref": {"model": {"path": "/actor"}},
        "critic": {"model": {"path": path}},
        "algorithm": {"adv_estimator": "gae"},
    }
    model.check_model(config, {"name": "actor"})
    assert uses == [(name, name == "actor", 8) for name in asked]
    uses.clear()
    model.check_model(config | {"algorithm": {"adv_estimator": "grpo"}}, {"name": "actor"})
    assert uses == [("actor", True, 8)]


@pytest.mark.parametrize(
    "text, sentence, cause",
    [
        ("first\n\n  last  \n", "last", None),
        ("NPU OUT OF MEMORY. Tried", "a die ran out of device memory", "OOM"),
        (
            "the out of memory issue ... exceeds the memory usage threshold",
            "a node ran out of host memory",
            "host_memory",
        ),
        ("No available memory for the cache blocks", "no device memory is left for the KV cache", "bad_configuration"),
    ],
)
def test_failure_is_its_last_line_unless_it_is_known(text, sentence, cause):
    found, because = describe_failure(RuntimeError(text))
    assert found.startswith(sentence) and because == cause


@pytest.mark.parametrize("estimator, models", [("grpo", 1), ("gae", 2)])
@pytest.mark.parametrize("last, most, kept", [(0, None, 0), (0, 3, 3), (2, 3, 2)])
def test_space_is_asked_for_all_checkpoints_that_are_kept(monkeypatch, estimator, models, last, most, kept):
    asked = []
    monkeypatch.setattr(files, "check_space", lambda root, model, keep, models: asked.append((keep.keep_last, models)))
    monkeypatch.setattr(files, "described", {"/model": {}}.get)
    config = {
        "trainer": {"save_freq": 1, "max_actor_ckpt_to_keep": most, "default_local_dir": "/checkpoints"},
        "actor_rollout_ref": {"model": {"path": "/model"}},
        "algorithm": {"adv_estimator": estimator},
    }
    settings = SimpleNamespace(checkpoint=CheckpointSettings(keep_last=last))
    files.check_checkpoint_space(config, settings)
    assert asked == [(kept, models)]
    files.check_checkpoint_space(config | {"trainer": config["trainer"] | {"save_freq": -1}}, settings)
    assert len(asked) == 1
