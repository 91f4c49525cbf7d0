"""The model's `rope_scaling`, which training and rollout read each in their own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError
from verl_patches.trainer.configuration_checks.backends import backend_of

_ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_READ = ("rope_scaling", "rope_theta", "max_position_embeddings", "model_type", "architectures")


def check_rotary(config: Mapping[str, Any], model: Mapping[str, Any] | None) -> None:
    """Reject a `rope_scaling` with which rollout and training would rotate by different angles.

    Args:
        config: verl's composed configuration.
        model: The values of the model's config.json; nothing is checked without them.

    Raises:
        ConfigurationError: Names the scaling, both values and the remedy.
    """
    from post_training.models.rotary_scaling import UnsupportedScaling, by_vllm, difference

    if model is None:
        return
    trained_model, served_model = _trained(config, model), _served(config, model)
    scaling = trained_model.get("rope_scaling") or served_model.get("rope_scaling")
    named = f"config.json's rope_scaling={json.dumps(scaling)} is invalid"
    try:
        trained, served = _rotation_of_training(config, trained_model), by_vllm(served_model)
    except UnsupportedScaling as error:
        raise ConfigurationError(f"{named}: {error}") from error
    found = difference(trained, served)
    if found:
        name, of_training, of_rollout = found
        raise ConfigurationError(
            f"{named}: training takes {of_training} for its {name}, and the rollout {of_rollout}, so that they are two "
            f"models. {_remedy(served_model, name)}"
        )


def _rotation_of_training(config: Mapping[str, Any], model: Mapping[str, Any]) -> Any:
    from post_training.models.families import family_of
    from post_training.models.rotary_scaling import by_megatron, by_transformers

    if backend_of(config) == "fsdp":
        return by_transformers(model)
    return by_megatron(model, family_of(model).rotary)


def _trained(config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What the training reads: config.json with the overrides of the configuration."""
    overrides = config["actor_rollout_ref"]["model"].get("override_config") or {}
    if backend_of(config) == "megatron":
        overrides = overrides.get("model_config") or {}
    return {name: {**model, **overrides}.get(name) for name in _READ}


def _served(config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine reads: config.json with the engine's own arguments."""
    engine = config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"] or {}
    overrides = engine.get("hf_overrides")
    values = {**model, **(overrides if isinstance(overrides, Mapping) else {})}
    values |= {name: engine[name] for name in ("rope_scaling", "rope_theta") if engine.get(name)}
    return {name: values.get(name) for name in _READ}


def _remedy(served: Mapping[str, Any], name: str) -> str:
    scaling = served.get("rope_scaling") or {}
    if name == "factor" and "original_max_position_embeddings" in scaling:
        longest = int(scaling["factor"] * scaling["original_max_position_embeddings"])
        return (
            f"Set max_position_embeddings={longest} in config.json, which is factor x original_max_position_embeddings"
        )
    if name == "attention factor":
        return "Take attention_factor, attn_factor, mscale and mscale_all_dim out of rope_scaling in config.json"
    if name == "rope_type":
        return "Set rope_scaling in config.json to null, or to linear, llama3 or yarn scaling"
    if name == "rope_theta":
        return f"Set rope_theta in config.json, and take {_ENGINE}.rope_theta and hf_overrides away"
    return f"Set {name} in config.json alone, to the published value"
