"""The feature learning_rate: its purpose, and the check of verl's keys for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError, Feature

_OPTIM = "actor_rollout_ref.actor.optim"


def check_minimum(config: Mapping[str, Any], settings: Any) -> None:
    """Reject a minimum rate with a constant schedule, which never falls to it."""
    optim = config["actor_rollout_ref"]["actor"]["optim"]
    if optim.get("min_lr_ratio") and optim.get("warmup_style", "constant") == "constant":
        raise ConfigurationError(
            f"{_OPTIM}.min_lr_ratio={optim['min_lr_ratio']} has no effect with {_OPTIM}.warmup_style=constant. Set "
            "that to linear or cosine, or remove it"
        )


LEARNING_RATE = Feature(
    name="learning_rate",
    purpose="The learning rate warms up and decays as verl's keys say, and depends only on the number of the step.",
    checks=(check_minimum,),
)
