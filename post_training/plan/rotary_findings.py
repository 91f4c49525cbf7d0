"""Checks the model's `rope_scaling`, which training and rollout each interpret in their own way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from post_training.models.families import family_of
from post_training.models.rotary_scaling import (
    UnsupportedScaling,
    by_megatron,
    by_transformers,
    by_vllm,
    difference,
)

_ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_READ = ("rope_scaling", "rope_theta", "max_position_embeddings", "model_type", "architectures")


def rotary_findings(model: Mapping[str, Any], node: Mapping[str, Any], backend: str) -> Iterator[str]:
    """Yield an error for a `rope_scaling` with which rollout and training would rotate by different angles.

    Args:
        model: values of the config.json of a model of a known family.
        node: verl's group `actor_rollout_ref`.
        backend: `megatron` or `fsdp`.
    """
    trained_model, served_model = _trained(node, backend, model), _served(node, model)
    scaling = trained_model.get("rope_scaling") or served_model.get("rope_scaling")
    named = f"config.json's rope_scaling={json.dumps(scaling)} is invalid"
    try:
        trained, served = _rotation_of_training(backend, trained_model), by_vllm(served_model)
    except UnsupportedScaling as error:
        yield f"{named}: {error}"
        return
    found = difference(trained, served)
    if found:
        name, of_training, of_rollout = found
        yield (
            f"{named}: training uses {of_training} as its {name}, but the rollout {of_rollout}, so their models "
            f"differ. {_remedy(served_model, name)}"
        )


def _rotation_of_training(backend: str, model: Mapping[str, Any]) -> Any:
    if backend == "fsdp":
        return by_transformers(model)
    return by_megatron(model, family_of(model).rotary)


def _trained(node: Mapping[str, Any], backend: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that training reads: config.json with the configuration's overrides."""
    overrides = node["model"].get("override_config") or {}
    if backend == "megatron":
        overrides = overrides.get("model_config") or {}
    return {name: {**model, **overrides}.get(name) for name in _READ}


def _served(node: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the engine reads: config.json with the engine's own arguments."""
    engine = (node["rollout"].get("engine_kwargs") or {}).get("vllm") or {}
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
        return "Remove attention_factor, attn_factor, mscale and mscale_all_dim from rope_scaling in config.json"
    if name == "rope_type":
        return "Set rope_scaling in config.json to null, or to linear, llama3 or yarn scaling"
    if name == "rope_theta":
        return f"Set rope_theta in config.json, and remove {_ENGINE}.rope_theta and hf_overrides"
    return f"Set only {name} in config.json, to the published value"
