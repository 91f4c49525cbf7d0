"""What a configuration for FSDP must satisfy beside its schema: which of the overlay's features it can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError
from verl_patches.features.settings import OverlaySettings

_OVERLAY = "actor_rollout_ref.overlay"
_WRITTEN_FOR_MEGATRON = (
    (f"{_OVERLAY}.reshard.enabled", False, "verl's own manager gives the rollout its weights"),
    (f"{_OVERLAY}.residency.enabled", False, "vLLM-Ascend's sleep mode takes the rollout off the device"),
    (f"{_OVERLAY}.measure.verify_weights", False, "precision=float32 and its limit for log-probs find stale weights"),
    (f"{_OVERLAY}.mindspeed.engine", "off", "MindSpeed changes Megatron"),
    (f"{_OVERLAY}.rollout.expert_parallel_size", 1, "vLLM's expert parallelism needs reshard"),
    (f"{_OVERLAY}.router_balance.forced", False, "it is for models of experts on Megatron"),
)


def check_features(config: Mapping[str, Any], settings: OverlaySettings) -> None:
    """Nothing is on that moves or changes what only Megatron has."""
    for key, needed, instead in _WRITTEN_FOR_MEGATRON:
        value: Any = settings
        for name in key.removeprefix(f"{_OVERLAY}.").split("."):
            value = getattr(value, name)
        if value != needed:
            raise ConfigurationError(
                f"{key}={value} is for Megatron, and this configuration trains with FSDP, where {instead}; set it to "
                f"{str(needed).lower()}"
            )
