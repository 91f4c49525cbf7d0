"""The model's config.json against the layout that the configuration gives it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlay import ConfigurationError
from post_training.user_files import FileError, read_object
from verl_patches.trainer.configuration_checks.handed_over import OWN_TRANSFORMER_OPTIONS

_PATH = "actor_rollout_ref.model.path"
_MEGATRON = "actor_rollout_ref.actor.megatron"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"


def check_model_path(config: Mapping[str, Any]) -> None:
    """The model's folder is named; a configuration that cannot know it holds null."""
    if not config["actor_rollout_ref"]["model"]["path"]:
        raise ConfigurationError(
            f"{_PATH} is not set; give the folder with the model's config.json, tokenizer and weights"
        )


def described(path: str) -> Mapping[str, Any] | None:
    """config.json of a model's folder; None where this machine has none.

    Raises:
        ConfigurationError: there is one, and it describes no model.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        return read_object(file)
    except FileError as error:
        if error.missing:
            return None
        raise ConfigurationError(f"{error}; copy the model again") from error


def check_layout(config: Mapping[str, Any], model: Mapping[str, Any] | None) -> None:
    """The layers lie on the pipeline's stages; of `model`, the values of config.json, sizes divide among the ranks.

    Sizes that the model does not name are not checked.
    """
    megatron = config["actor_rollout_ref"]["actor"]["megatron"]
    _check_stages(megatron, (model or {}).get("num_hidden_layers"))
    if model is None:
        return
    _check_own_options(megatron["override_transformer_config"], model)
    _check_heads(f"{_MEGATRON}.tensor_model_parallel_size", megatron["tensor_model_parallel_size"], model)
    check_rollout_heads(config, model)
    experts = model.get("n_routed_experts") or model.get("num_experts")
    ranks = megatron["expert_model_parallel_size"]
    if megatron["override_transformer_config"].get("moe_tp_extend_ep"):
        ranks *= megatron["tensor_model_parallel_size"]
    if isinstance(experts, int) and experts % ranks:
        raise ConfigurationError(
            f"{_MEGATRON}.expert_model_parallel_size={megatron['expert_model_parallel_size']} puts the model's "
            f"{experts} experts on {ranks} ranks, which does not go evenly; change it"
        )


def _check_own_options(options: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Fields that the overlay adds to Megatron's configuration are those of models that it builds."""
    from post_training.models.families import find_family

    family = find_family(model)
    if family is None or family.megatron is not None:
        return
    for name in sorted(OWN_TRANSFORMER_OPTIONS & options.keys()):
        key = f"{_TRANSFORMER}.{name}"
        raise ConfigurationError(
            f"{key}={options[name]} is for models that the overlay builds, and verl builds {family.name}; take the key "
            f"away with ~{key}"
        )


def check_rollout_heads(config: Mapping[str, Any], model: Mapping[str, Any] | None) -> None:
    """The attention heads divide among the dies of a rollout instance, and among those that share sequences.

    vLLM and verl repeat the heads of key and value where there are fewer than dies.
    """
    if model is None:
        return
    for key in ("rollout.tensor_model_parallel_size", "actor.ulysses_sequence_parallel_size"):
        section, name = key.split(".")
        size = config["actor_rollout_ref"][section].get(name) or 1
        _check_heads(f"actor_rollout_ref.{key}", size, model)
        _check_key_value_heads(f"actor_rollout_ref.{key}", size, model)


def _check_heads(key: str, size: int, model: Mapping[str, Any]) -> None:
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        raise ConfigurationError(f"{key}={size} does not divide the model's {heads} attention heads; use a divisor")


def _check_key_value_heads(key: str, size: int, model: Mapping[str, Any]) -> None:
    """Each die has as many as another, or is one of equally many that have a copy of the same."""
    heads = model.get("num_key_value_heads")
    if isinstance(heads, int) and heads > 0 and heads % size and size % heads:
        raise ConfigurationError(
            f"{key}={size} neither divides the model's {heads} heads of key and value nor is a multiple of them; use a "
            "divisor or a multiple"
        )


def _check_stages(megatron: Mapping[str, Any], layers: int | None) -> None:
    """Every stage has layers, and all stages together those of the model."""
    options = megatron["override_transformer_config"]
    chunks = megatron["pipeline_model_parallel_size"] * (megatron["virtual_pipeline_model_parallel_size"] or 1)
    listed = options.get("num_layer_list")
    if listed is not None:
        key = f"{_TRANSFORMER}.num_layer_list={listed}"
        if len(listed) != chunks:
            raise ConfigurationError(
                f"{key} has length {len(listed)}, and {_MEGATRON}.pipeline_model_parallel_size makes {chunks} stages; "
                f"give {chunks} numbers, one a stage"
            )
        if layers is not None and sum(listed) != layers:
            raise ConfigurationError(
                f"{key} adds up to {sum(listed)} layers, and the model has {layers}; make it {layers}"
            )
    elif layers is not None and layers % chunks:
        raise ConfigurationError(
            f"{_MEGATRON}.pipeline_model_parallel_size={megatron['pipeline_model_parallel_size']} does not divide the "
            f"model's {layers} layers; say with {_TRANSFORMER}.num_layer_list how many each stage has"
        )
