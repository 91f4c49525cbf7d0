"""The feature residency: its configuration, its switch, and what it does not go together with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature


@dataclass(frozen=True)
class ResidencySettings:
    """Keep on the device only what the present phase needs."""

    enabled: bool = True


def check_offload(config: Mapping[str, Any], settings: Any) -> None:
    """Residency and verl's own offload switches do not both move the same tensors."""
    for role, switches in (("actor", ("param", "grad", "optimizer")), ("ref", ("param",))):
        for switch in switches:
            key = f"{switch}_offload"
            if config["actor_rollout_ref"][role]["megatron"].get(key, False):
                raise ConfigurationError(
                    f"actor_rollout_ref.{role}.megatron.{key}=True and {RESIDENCY.switch}=true would both move the "
                    "same tensors; switch one of them off"
                )


RESIDENCY = Feature(
    name="residency",
    purpose="The device holds only what the present phase of a step needs; everything else waits in host memory.",
    section="actor_rollout_ref.overlay.residency",
    settings=ResidencySettings,
    switch="actor_rollout_ref.overlay.residency.enabled",
    is_on=lambda settings: settings.residency.enabled,
    checks=(check_offload,),
)
