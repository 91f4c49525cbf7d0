"""The feature partial_rollout: its configuration, its switch, and the settings that exclude it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay import ConfigurationError, Feature
from post_training.plan.partial_rollout import LEAST_THRESHOLD
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.dynamic_sampling.feature import DYNAMIC_SAMPLING
from verl_patches.features.rollout_correction.feature import ROLLOUT_CORRECTION
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL
from verl_patches.features.rollout_rebalance.feature import ROLLOUT_REBALANCE

_SECTION = "actor_rollout_ref.overlay.partial_rollout"
_SWITCH = f"{_SECTION}.enabled"


@dataclass(frozen=True)
class PartialRolloutSettings:
    """End a step's rollout when enough groups of answers are finished; the others continue in later steps.

    threshold, from 0.5 to 1, is the share of the prompts in flight whose answers all have to be finished;
    train_batch_size / threshold prompts are in flight. max_steps is the number of further steps in which an answer may
    continue; in the last of them it runs to its end.
    """

    enabled: bool = False
    threshold: float = 0.8
    max_steps: int = field(default=2, metadata={"at_least": 1})


def check_numbers(config: Mapping[str, Any], settings: Any) -> None:
    """Check the range of the threshold, within which the due answers of a step fit into its batch."""
    threshold = settings.partial_rollout.threshold
    if not LEAST_THRESHOLD <= threshold <= 1:
        raise ConfigurationError(
            f"{_SECTION}.threshold={threshold} is invalid: between {LEAST_THRESHOLD} and 1 at most one batch of "
            "prompts waits. Set it to a number such as 0.8"
        )


def check_company(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the features it needs are on, and that features which expect finished answers are off."""
    if not settings.recompute_old_log_prob:
        raise ConfigurationError(
            f"{_SWITCH}=true trains on tokens of older weights, but "
            "actor_rollout_ref.actor.recompute_old_log_prob=False does not compute their old log-probs. Set that to "
            "True"
        )
    if not settings.rollout_correction.enabled:
        raise ConfigurationError(
            f"{_SWITCH}=true trains on tokens of older weights, which {ROLLOUT_CORRECTION.switch}=False treats as "
            "current ones. Set that to true"
        )
    rejected = (
        (DYNAMIC_SAMPLING, "chooses among the answers of one step"),
        (ROLLOUT_REBALANCE, "moves answers away from the engine that would stop them"),
    )
    for feature, why in rejected:
        if feature.is_on(settings):
            raise ConfigurationError(
                f"{_SWITCH}=true cannot be combined with {feature.switch}=true, which {why}. Switch one of them off"
            )


def check_rollout(config: Mapping[str, Any], settings: Any) -> None:
    """Check that engines can agree on the end of a rollout, and that answers can continue where they stopped."""
    node = config["actor_rollout_ref"]["rollout"]
    experts, tensor_parallel = settings.rollout.expert_parallel_size, node["tensor_model_parallel_size"]
    if experts > tensor_parallel and not settings.dp_sync.enabled:
        raise ConfigurationError(
            f"{_SWITCH}=true needs {DP_SYNC.switch}=true where {ROLLOUT_EXPERT_PARALLEL.switch}={experts} makes "
            "engines of one model, which agree on the end of a rollout. Set it"
        )
    if node.get("mode", "sync") != "sync":
        raise ConfigurationError(
            f"{_SWITCH}=true stops engines that run in step with the training, but "
            f"actor_rollout_ref.rollout.mode={node['mode']} has others. Set it to sync"
        )
    for name, plain in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
        if node.get(name) not in (None, plain):
            raise ConfigurationError(
                f"{_SWITCH}=true cannot be combined with actor_rollout_ref.rollout.{name}={node[name]}, which depends "
                f"on where an answer began. Set it to {plain}"
            )
    if config["algorithm"]["adv_estimator"] == "remax":
        raise ConfigurationError(
            f"{_SWITCH}=true cannot be combined with algorithm.adv_estimator=remax, which generates for the prompts of "
            "a step once more. Set another estimator"
        )


PARTIAL_ROLLOUT = Feature(
    name="partial_rollout",
    purpose="A rollout ends before its last answers, which continue in later steps with the tokens they have.",
    section=_SECTION,
    settings=PartialRolloutSettings,
    checks=(check_numbers, check_company, check_rollout),
)
