"""The feature mindspeed: its configuration, its switch, and the checks of what it can run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from overlay import ConfigurationError, Feature

PACKAGES = ("megatron.training", "mindspeed", "mindspeed_llm")
MODEL_KEYS = ("num_layer_list", "moe_tp_extend_ep")
"""Keys of override_transformer_config that are translated."""
ALWAYS: Mapping[str, Any] = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
"""Keys of it that guides to verl set, with the values that MindSpeed-LLM always gets."""


@dataclass(frozen=True)
class MindspeedSettings:
    """`auto` takes MindSpeed and MindSpeed-LLM where both can be imported, `on` demands them, `off` never takes them.

    fused_operators: rotary embedding, SwiGLU, RMSNorm, permutation of tokens and accumulation of weight gradients by
    MindSpeed's fused kernels. swap_optimizer: the optimizer's state lives on the host and passes through the device in
    swap_optimizer_times parts. Recomputation is chosen by verl's own keys, model.gradient_checkpointing_kwargs.
    """

    engine: Literal["auto", "on", "off"] = "auto"
    fused_operators: bool = True
    swap_optimizer: bool = False
    swap_optimizer_times: int = field(default=16, metadata={"at_least": 1})


def is_importable() -> bool:
    """Return whether this process could import everything that the engine needs; only parent packages are imported."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in PACKAGES)
    except ModuleNotFoundError:  # the parent package is absent
        return False


def check_installed(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the packages that `on` needs can be imported."""
    if not is_importable():
        raise ConfigurationError(
            f"{MINDSPEED.switch}=on needs {', '.join(PACKAGES)}, but some cannot be imported. Assemble the workspace "
            "with scripts/assemble_workspace.sh, or set it to auto"
        )


def check_family(config: Mapping[str, Any], settings: Any) -> None:
    """Check that, with `on`, MindSpeed-LLM builds the model."""
    from post_training.models.families import families

    if settings.mindspeed.engine == "on" and not _may_be_trained_here(config):
        known = " and ".join(each.name for each in families() if each.mindspeed)
        raise ConfigurationError(
            f"{MINDSPEED.switch}=on trains through MindSpeed-LLM, which builds {known} but not the model in "
            f"{config['actor_rollout_ref']['model']['path']}. Set it to auto or off"
        )


def check_translation(config: Mapping[str, Any], settings: Any) -> None:
    """Check that every setting of the model can be translated, if MindSpeed-LLM builds its family."""
    if _may_be_trained_here(config):
        _check_layout(config)
        _check_model(config)


def _may_be_trained_here(config: Mapping[str, Any]) -> bool:
    """Return whether MindSpeed-LLM builds the model; True if this machine cannot read its config.json."""
    from post_training.models.families import find_family

    try:
        text = (Path(config["actor_rollout_ref"]["model"]["path"]).expanduser() / "config.json").read_text()
    except OSError:
        return True
    family = find_family(json.loads(text))
    return family is not None and family.mindspeed is not None


def _check_layout(config: Mapping[str, Any]) -> None:
    megatron = config["actor_rollout_ref"]["actor"]["megatron"]
    key = "actor_rollout_ref.actor.megatron"
    if megatron.get("virtual_pipeline_model_parallel_size"):
        raise _rejected(f"{key}.virtual_pipeline_model_parallel_size", "set it to null")
    if megatron["tensor_model_parallel_size"] > 1 and not megatron["sequence_parallel"]:
        raise _rejected(f"{key}.sequence_parallel=False", "set it to True: experts with tensor parallelism need it")
    if not megatron["use_distributed_optimizer"]:
        raise _rejected(f"{key}.use_distributed_optimizer=False", "set it to True")
    overrides = megatron.get("override_transformer_config") or {}
    for name, value in overrides.items():
        if name in ALWAYS and value != ALWAYS[name]:
            raise _rejected(
                f"{key}.override_transformer_config.{name}={value}", f"set it to {ALWAYS[name]}, or remove it"
            )
        if name not in (*MODEL_KEYS, *ALWAYS):
            raise _rejected(f"{key}.override_transformer_config.{name}", f"only {' and '.join(MODEL_KEYS)} are")
    if overrides.get("moe_tp_extend_ep") is False:
        raise _rejected(f"{key}.override_transformer_config.moe_tp_extend_ep=False", "set it to true")


def _check_model(config: Mapping[str, Any]) -> None:
    model = config["actor_rollout_ref"]["model"]
    key = "actor_rollout_ref.model"
    experts = (model.get("override_config") or {}).get("moe_config") or {}
    for name in ("freeze_moe_router", "fix_moe_router"):
        if experts.get(name):
            raise _rejected(f"{key}.override_config.moe_config.{name}", "set it to False")
    if not model.get("enable_gradient_checkpointing"):
        return
    granularity = model["gradient_checkpointing_kwargs"]["activations_checkpoint_granularity"]
    if granularity != "full":
        raise _rejected(
            f"{key}.gradient_checkpointing_kwargs.activations_checkpoint_granularity={granularity}", "choose full"
        )


def check_precision(config: Mapping[str, Any], settings: Any) -> None:
    """Reject swap_optimizer in float32: MindSpeed swaps the float32 copies of bfloat16 parameters."""
    if settings.mindspeed.swap_optimizer and settings.precision != "bfloat16":
        raise ConfigurationError(
            f"{MINDSPEED.section}.swap_optimizer moves the float32 copies of bfloat16 parameters, but "
            f"actor_rollout_ref.overlay.precision={settings.precision} has none. Set it to false"
        )


def _rejected(key: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{key} is not translated for MindSpeed-LLM: {remedy}, or set {MINDSPEED.switch}=off")


def _is_on(settings: Any) -> bool:
    return settings.mindspeed.engine == "on" or (settings.mindspeed.engine == "auto" and is_importable())


MINDSPEED = Feature(
    name="mindspeed",
    purpose="Families that MindSpeed-LLM supports are trained through it and MindSpeed where they are installed.",
    section="actor_rollout_ref.overlay.mindspeed",
    settings=MindspeedSettings,
    switch="actor_rollout_ref.overlay.mindspeed.engine",
    off="off",
    is_on=_is_on,
    checks=(check_installed, check_family, check_translation, check_precision),
)
