"""The feature rollout_correction: its configuration, its switch, and the settings that exclude it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature
from verl_patches.features.temperature.feature import narrowed_by

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class RolloutCorrectionSettings:
    """Weigh each token by min(p_old / p_rollout, cap), the truncated importance ratio of training to rollout."""

    enabled: bool = False
    cap: float = 2.0


def check_old_log_probs(config: Mapping[str, Any], settings: Any) -> None:
    """Check that old log-probs, and with them the weights, are known before the update."""
    if not settings.recompute_old_log_prob:
        raise ConfigurationError(
            f"{ROLLOUT_CORRECTION.switch}=True compares old log-probs with the rollout's, but "
            f"{_ACTOR}.recompute_old_log_prob=False does not compute them. Set that to True"
        )


def check_cap(config: Mapping[str, Any], settings: Any) -> None:
    """Reject a cap below 1, which would reduce the weight even of tokens that both sides find equally likely."""
    cap = settings.rollout_correction.cap
    if not cap >= 1:
        raise ConfigurationError(
            f"actor_rollout_ref.overlay.rollout_correction.cap={cap} is invalid: an exact rollout has the ratio 1. Set "
            "it to at least 1, such as 2"
        )


def check_whole_vocabulary(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the rollout draws from the whole vocabulary, over which training computes probabilities."""
    for name, (value, remedy) in narrowed_by(config["actor_rollout_ref"]["rollout"]).items():
        raise ConfigurationError(
            f"{_ROLLOUT}.{name}={value} is invalid with {ROLLOUT_CORRECTION.switch}=true: the rollout draws from only "
            f"a part of the vocabulary that training uses, so the ratio of every token is wrong. Set it to {remedy}, "
            "or switch the correction off"
        )


ROLLOUT_CORRECTION = Feature(
    name="rollout_correction",
    purpose="Tokens are weighted by training's probability of the rollout's samples (truncated importance sampling).",
    section="actor_rollout_ref.overlay.rollout_correction",
    settings=RolloutCorrectionSettings,
    checks=(check_old_log_probs, check_cap, check_whole_vocabulary),
)
