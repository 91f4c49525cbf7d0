"""Translates MindSpeed's options under override_transformer_config, where guides to verl write them, to overlay keys.

verl passes that group to Megatron's configuration, which has no such fields, and MindSpeed-LLM reads a command line,
which `arguments` makes from the overlay's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlay import ConfigurationError
from verl_patches.features.mindspeed.feature import MINDSPEED

if TYPE_CHECKING:
    from omegaconf import DictConfig

_GROUP = "megatron.override_transformer_config"
_ACTOR = "actor_rollout_ref.actor"
_OTHERS = ("actor_rollout_ref.ref", "critic", "reward_model")
_SWAP = ("swap_optimizer", "swap_optimizer_times")
_FUSED = (
    "use_fused_rotary_pos_emb",
    "use_fused_swiglu",
    "use_fused_rmsnorm",
    "use_fused_moe_token_permute_and_unpermute",
    "gemm_gradient_accumulation_fusion",
)
_ATTENTION = "use_flash_attn"
OPTIONS = (*_SWAP, *_FUSED, _ATTENTION)


def translate_options(config: DictConfig) -> None:
    """Move MindSpeed's options from the actor's override_transformer_config to the overlay's keys, in place.

    Raises:
        ConfigurationError: an option has an unsupported value, or is given for a model other than the actor.
    """
    from omegaconf import OmegaConf, open_dict

    for role in _OTHERS:
        megatron = OmegaConf.select(config, f"{role}.megatron")
        if not OmegaConf.is_dict(megatron) or OmegaConf.is_interpolation(megatron, "override_transformer_config"):
            continue  # FSDP has no such group, verl's reference policy refers to the actor's; other values fail later
        for name in _given(OmegaConf.select(config, f"{role}.{_GROUP}")):
            raise ConfigurationError(
                f"{role}.{_GROUP}.{name} is invalid: MindSpeed has one command line for all models of a process. Set "
                f"{_key_of(name)}"
            )
    group = OmegaConf.select(config, f"{_ACTOR}.{_GROUP}")
    given = _given(group)
    if not given:
        return
    values = _translation(given)
    with open_dict(config):
        for name in given:
            del group[name]
        for name, value in values.items():
            OmegaConf.update(config, f"{MINDSPEED.section}.{name}", value)


def _given(group: Any) -> dict[str, Any]:
    return {name: group[name] for name in OPTIONS if isinstance(group, Mapping) and name in group}


def _key_of(name: str) -> str:
    own = name if name in _SWAP else "fused_operators"
    return f"{MINDSPEED.section}.{own}"


def _translation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the equivalent keys of the overlay, by name in MindSpeed's section.

    Raises:
        ConfigurationError: a value is unsupported.
    """
    key = f"{_ACTOR}.{_GROUP}"
    for name, value in given.items():
        if name != "swap_optimizer_times" and not isinstance(value, bool):
            raise ConfigurationError(f"{key}.{name}={value} is invalid. Set it to True or False")
    if given.get(_ATTENTION) is False:
        raise ConfigurationError(
            f"{key}.{_ATTENTION}=False is invalid: only the fused attention reads packed sequences. Set it to True, or "
            "remove it"
        )
    fused = {name: given[name] for name in _FUSED if name in given}
    if len(set(fused.values())) > 1:
        off = next(name for name, value in fused.items() if not value)
        raise ConfigurationError(
            f"{key}.{off}=False is invalid: the fused operators share one switch, and others are True. Set "
            f"{_key_of(off)} to true or false instead of all of them"
        )
    values: dict[str, Any] = {name: given[name] for name in _SWAP if name in given}
    return values | ({"fused_operators": next(iter(fused.values()))} if fused else {})
