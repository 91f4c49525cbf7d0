"""Checks of PPO's critic beyond its schema: its model must read the actor's tokens, and its batches must divide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlay import ConfigurationError
from verl_patches.features.mindspeed.feature import is_importable
from verl_patches.trainer.configuration_checks.backends import backend_of
from verl_patches.trainer.configuration_checks.model import described
from verl_patches.trainer.configuration_checks.sizes import number_of_dies, training_data_parallel_size

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
GAE = "algorithm.adv_estimator=gae"


def check_critic(config: Mapping[str, Any]) -> None:
    """Check that the critic can run as configured. Only GAE has a critic; otherwise nothing reads its keys."""
    if config["algorithm"]["adv_estimator"] != "gae":
        return
    _check_model(config)
    _check_batches(config)
    if backend_of(config) == "megatron":
        _check_megatron(config)
    else:
        _check_tokens(config)


def _check_model(config: Mapping[str, Any]) -> None:
    path, actors = config["critic"]["model"]["path"], config["actor_rollout_ref"]["model"]["path"]
    if not path:
        raise ConfigurationError(
            "critic.model.path is not set. Set it to a folder with a model that has the actor's tokens, such as "
            "actor_rollout_ref.model.path itself"
        )
    own, other = described(path), described(actors)
    if own is not None and other is not None and own.get("vocab_size") != other.get("vocab_size"):
        raise ConfigurationError(
            f"critic.model.path={path} is invalid: its vocabulary is {own.get('vocab_size')}, but the critic reads the "
            f"actor's tokens with {other.get('vocab_size')}. Set it to a model with the actor's tokens"
        )


def _check_batches(config: Mapping[str, Any]) -> None:
    critic, responses = config["critic"], config["actor_rollout_ref"]["rollout"]["n"]
    prompts, replicas = config["data"]["train_batch_size"], training_data_parallel_size(config)
    mini, micro = critic["ppo_mini_batch_size"], critic["ppo_micro_batch_size_per_gpu"]
    if critic["rollout_n"] != responses:
        raise ConfigurationError(
            f"critic.rollout_n={critic['rollout_n']} is invalid: verl computes the critic's mini batches with it. Set "
            f"it to actor_rollout_ref.rollout.n={responses}"
        )
    if prompts % mini:
        raise ConfigurationError(
            f"data.train_batch_size={prompts} is not a multiple of critic.ppo_mini_batch_size={mini}. Set a mini batch "
            "that divides it"
        )
    if (mini * responses) % replicas:
        raise ConfigurationError(
            f"critic.ppo_mini_batch_size={mini} prompts x {responses} responses do not divide among {replicas} "
            f"training replicas of {number_of_dies(config)} dies. Change it or actor_rollout_ref.rollout.n"
        )
    per_replica = mini * responses // replicas
    if not critic["use_dynamic_bsz"] and (not micro or micro > per_replica or per_replica % micro):
        raise ConfigurationError(
            f"critic.ppo_micro_batch_size_per_gpu={micro} does not divide the {per_replica} sequences of a replica in "
            f"a mini batch. Set it to a divisor of {per_replica}"
        )


def _check_megatron(config: Mapping[str, Any]) -> None:
    """Check that the critic is cut as the actor is: both live in one process and share the actor's parallel groups."""
    critic, actor = config["critic"], config["actor_rollout_ref"]["actor"]
    for name in _SIZES:
        own, actors = critic["megatron"][name] or 1, actor["megatron"][name] or 1
        if own != actors:
            raise ConfigurationError(
                f"critic.megatron.{name}={own} is invalid: the critic trains in the actor's parallel groups. Set it to "
                f"{actors}"
            )
    if critic["megatron"]["use_dist_checkpointing"]:
        raise ConfigurationError(
            "critic.megatron.use_dist_checkpointing=true is not supported: a critic begins from a HuggingFace folder, "
            "critic.model.path. Set it to false"
        )
    if critic["use_dynamic_bsz"] != actor["use_dynamic_bsz"]:
        raise ConfigurationError(
            f"critic.use_dynamic_bsz={critic['use_dynamic_bsz']} is invalid: on Megatron the actor's value decides for "
            f"both. Set it to {str(actor['use_dynamic_bsz']).lower()}"
        )
    engine = config["actor_rollout_ref"]["overlay"].get("mindspeed", {}).get("engine", "auto")
    if engine == "on" or (engine == "auto" and is_importable()):
        raise ConfigurationError(
            f"{GAE} trains a critic, which is not tested with MindSpeed-LLM. Set "
            "actor_rollout_ref.overlay.mindspeed.engine=off"
        )
    folder = Path(critic["model"]["path"]).expanduser()
    if critic["load_weight"] and (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        raise ConfigurationError(
            f"critic.model.path={folder} is invalid: it has a config.json but no weights. Set it to the folder with "
            "the critic's initial safetensors files"
        )


def _check_tokens(config: Mapping[str, Any]) -> None:
    """Check the critic's token limits: verl's splitter rejects a limit below the width of the batch."""
    critic, data = config["critic"], config["data"]
    width = data["max_prompt_length"] + data["max_response_length"]
    for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
        if critic["use_dynamic_bsz"] and critic.get(name, width) < width:
            raise ConfigurationError(
                f"critic.{name}={critic[name]} is less than the {width} tokens of a prompt with its answer "
                f"(data.max_prompt_length + data.max_response_length). Set it to at least {width}"
            )
