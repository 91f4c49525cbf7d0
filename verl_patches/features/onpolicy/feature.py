"""The feature onpolicy: its switch, and the conditions under which it is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay import ConfigurationError, Feature, Key
from verl_patches.features.onpolicy.conditions import reason_old_log_prob_is_needed


def check_one_update(config: Mapping[str, Any], settings: Any) -> None:
    """Check that old_log_prob equals the log-prob of the update's own forward, as leaving it out requires."""
    reason = reason_old_log_prob_is_needed(config)
    if reason:
        raise ConfigurationError(
            f"{ONPOLICY.switch}=False is exact only with one update per rollout batch, but {reason}"
        )


ONPOLICY = Feature(
    name="onpolicy",
    purpose="The forward that recomputes old_log_prob is skipped where it would change nothing.",
    keys=(Key("recompute_old_log_prob", "actor_rollout_ref.actor.recompute_old_log_prob", bool, True),),
    switch="actor_rollout_ref.actor.recompute_old_log_prob",
    is_on=lambda settings: not settings.recompute_old_log_prob,
    checks=(check_one_update,),
)
