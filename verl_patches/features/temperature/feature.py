"""The feature temperature: its configuration, its switch, and the check of the temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature, Key


@dataclass(frozen=True)
class TemperatureSettings:
    """Divide training logits by the rollout temperature and report rollout log-probs at that temperature."""

    enabled: bool = True


# Sampling parameters by which vLLM may draw from another distribution than the model's at the temperature, and the
# values with which it does not, the default first.
_WHOLE_VOCABULARY: dict[str, tuple[Any, ...]] = {
    "top_k": (-1, 0),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}


def narrowed_by(rollout: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys of verl's node `rollout` that change the distribution of draws, with their value and default."""
    given = ((name, rollout.get(name), plain) for name, plain in _WHOLE_VOCABULARY.items())
    return {name: (value, plain[0]) for name, value, plain in given if value is not None and value not in plain}


def check_positive(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the rollout temperature is positive, as training log-probs at that temperature require."""
    if not settings.rollout_temperature > 0:
        raise ConfigurationError(
            f"actor_rollout_ref.rollout.temperature={settings.rollout_temperature} is invalid: training has no such "
            "log-probs. Set it to a positive temperature"
        )


TEMPERATURE = Feature(
    name="temperature",
    purpose="Training and rollout report log-probs at the rollout's sampling temperature.",
    section="actor_rollout_ref.overlay.temperature",
    settings=TemperatureSettings,
    keys=(Key("rollout_temperature", "actor_rollout_ref.rollout.temperature", float, 1.0),),
    checks=(check_positive,),
)
