"""The feature temperature: its configuration, its switch, and the temperatures that it can work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature, Key


@dataclass(frozen=True)
class TemperatureSettings:
    """Divide training logits by the rollout temperature and report rollout log-probs at that temperature."""

    enabled: bool = True


def check_positive(config: Mapping[str, Any], settings: Any) -> None:
    """Training log-probs at the rollout temperature exist only for a positive temperature."""
    if not settings.rollout_temperature > 0:
        raise ConfigurationError(
            f"actor_rollout_ref.rollout.temperature={settings.rollout_temperature} has no training log-probs; "
            "use a positive temperature"
        )


TEMPERATURE = Feature(
    name="temperature",
    purpose="Training and rollout report log-probs at the temperature with which the rollout samples.",
    section="actor_rollout_ref.overlay.temperature",
    settings=TemperatureSettings,
    keys=(Key("rollout_temperature", "actor_rollout_ref.rollout.temperature", float, 1.0),),
    switch="actor_rollout_ref.overlay.temperature.enabled",
    is_on=lambda settings: settings.temperature.enabled,
    checks=(check_positive,),
)
