"""The feature sample_handles: its configuration, its switch, and the settings that exclude it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature


@dataclass(frozen=True)
class SampleHandlesSettings:
    """Let workers keep the tokens that they generated and exchange them over the device's collectives, so that the
    driver sends an id, lengths and an advantage for each sample instead of its padded tokens."""

    enabled: bool = False


_SWITCH = "actor_rollout_ref.overlay.sample_handles.enabled"
# Settings whose code reads or moves columns that stay with the workers: the key, the value that does so, and why.
_IN_THE_WAY = (
    ("algorithm.adv_estimator", "gae", "a critic's worker reads the tokens"),
    ("algorithm.use_kl_in_reward", True, "the driver reads ref_log_prob"),
    ("algorithm.use_pf_ppo", True, "it draws samples again after their log-probs were computed"),
    ("reward_model.enable", True, "a reward model's worker reads the tokens"),
)


def check_combination(config: Mapping[str, Any], settings: Any) -> None:
    """Check that only Megatron's workers read the columns that stay with them."""
    strategy = config["actor_rollout_ref"]["actor"]["strategy"]
    if strategy != "megatron":
        raise ConfigurationError(
            f"{_SWITCH}=true keeps samples with Megatron's workers, but actor_rollout_ref.actor.strategy={strategy}. "
            "Set it to false"
        )
    for key, value, reason in _IN_THE_WAY:
        section, _, name = key.partition(".")
        if config[section].get(name) == value:
            raise ConfigurationError(
                f"{_SWITCH}=true cannot be combined with {key}={value}: {reason}. Change one of them"
            )


SAMPLE_HANDLES = Feature(
    name="sample_handles",
    purpose="Samples stay with the workers: the driver sends references, and tokens move from device to device.",
    section="actor_rollout_ref.overlay.sample_handles",
    settings=SampleHandlesSettings,
    checks=(check_combination,),
)
