"""The feature sequence_ratio: its configuration, its switch, and the settings that exclude it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class SequenceRatioSettings:
    """Compare policies by one ratio for a whole response, the geometric mean of its tokens' (GSPO), and clip that."""

    enabled: bool = False


def check_old_log_probs(config: Mapping[str, Any], settings: Any) -> None:
    """Check that old log-probs are recomputed; if the update used its own for them, every ratio would be 1."""
    if not settings.recompute_old_log_prob:
        raise ConfigurationError(
            f"{SEQUENCE_RATIO.switch}=True compares with old log-probs, but {_ACTOR}.recompute_old_log_prob=False "
            "takes the update's own for them. Set that to True"
        )


def check_mean(config: Mapping[str, Any], settings: Any) -> None:
    """Check the aggregation of the loss: every response has the same weight in GSPO's objective."""
    if settings.loss_agg_mode != "seq-mean-token-mean":
        raise ConfigurationError(
            f"{SEQUENCE_RATIO.switch}=True is a mean over responses, but "
            f"{_ACTOR}.loss_agg_mode={settings.loss_agg_mode} is another. Set it to seq-mean-token-mean"
        )


SEQUENCE_RATIO = Feature(
    name="sequence_ratio",
    purpose="Policies are compared by one importance ratio for a whole response (GSPO).",
    section="actor_rollout_ref.overlay.sequence_ratio",
    settings=SequenceRatioSettings,
    checks=(check_old_log_probs, check_mean),
)
