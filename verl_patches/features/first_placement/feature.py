"""The feature first_placement: its configuration and its switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature
from verl_patches.features.partial_rollout.feature import PARTIAL_ROLLOUT
from verl_patches.features.request_noise.feature import REQUEST_NOISE

_SECTION = "actor_rollout_ref.overlay.first_placement"
_SWITCH = f"{_SECTION}.enabled"


@dataclass(frozen=True)
class FirstPlacementSettings:
    """Distribute prompts over rollout engines by the mean length of each prompt's answers in the epoch before.

    Long answers are then spread evenly. Needs request_noise, and does nothing in the first epoch.
    """

    enabled: bool = False


def check_placement(config: Mapping[str, Any], settings: Any) -> None:
    """Check that any engine may answer any prompt, and that a whole batch is distributed at once."""
    if not settings.first_placement.enabled:
        return
    if not settings.request_noise.enabled:
        raise ConfigurationError(
            f"{_SWITCH}=true needs {REQUEST_NOISE.switch}=true, or samples depend on the engine that runs the request. "
            "Set it, or switch first_placement off"
        )
    if settings.partial_rollout.enabled:
        raise ConfigurationError(
            f"{_SWITCH}=true cannot be combined with {PARTIAL_ROLLOUT.switch}=true, which places continued answers by "
            "their position. Switch one of them off"
        )
    mode = config["actor_rollout_ref"]["rollout"].get("mode", "sync")
    if mode != "sync":
        raise ConfigurationError(
            f"{_SWITCH}=true places the prompts of a whole batch, but actor_rollout_ref.rollout.mode={mode} sends them "
            "one by one. Set it to sync, or switch first_placement off"
        )


FIRST_PLACEMENT = Feature(
    name="first_placement",
    purpose="Prompts are distributed to rollout engines by the lengths of their answers in the previous epoch.",
    section=_SECTION,
    settings=FirstPlacementSettings,
    checks=(check_placement,),
)
