"""The feature rollout_expert_parallel: its configuration, its switch, and the sizes that vLLM has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay import ConfigurationError, Feature


@dataclass(frozen=True)
class RolloutSettings:
    """How the rollout spreads experts; 1 leaves vLLM's expert parallelism off."""

    expert_parallel_size: int = field(default=1, metadata={"at_least": 1})


def check_size(config: Mapping[str, Any], settings: Any) -> None:
    """vLLM spreads experts over all dies of the rollout or over none."""
    dies = config["trainer"]["n_gpus_per_node"] * config["trainer"]["nnodes"]
    experts = settings.rollout.expert_parallel_size
    if experts != dies:
        raise ConfigurationError(
            f"{ROLLOUT_EXPERT_PARALLEL.switch}={experts} is neither 1 nor the {dies} dies; "
            f"vLLM spreads experts over all of TP x DP, so set it to {dies} (or to 1 to switch it off)"
        )


ROLLOUT_EXPERT_PARALLEL = Feature(
    name="rollout_expert_parallel",
    purpose="Data-parallel rollout engines form one model with the experts spread over all dies.",
    section="actor_rollout_ref.overlay.rollout",
    settings=RolloutSettings,
    switch="actor_rollout_ref.overlay.rollout.expert_parallel_size",
    is_on=lambda settings: settings.rollout.expert_parallel_size > 1,
    checks=(check_size,),
)
