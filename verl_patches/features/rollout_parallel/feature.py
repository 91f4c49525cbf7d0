"""The feature rollout_expert_parallel: its configuration, its switch, and the sizes that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay import ConfigurationError, Feature


@dataclass(frozen=True)
class RolloutSettings:
    """How the rollout spreads experts: expert_parallel_size dies (TP x DP) form one instance of the model, and the dies
    divide into such instances. 1 leaves vLLM's expert parallelism off."""

    expert_parallel_size: int = field(default=1, metadata={"at_least": 1})


def check_size(config: Mapping[str, Any], settings: Any) -> None:
    """The dies divide into instances of the rollout, and an instance into whole tensor-parallel groups."""
    dies = config["trainer"]["n_gpus_per_node"] * config["trainer"]["nnodes"]
    tensor_parallel = config["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"]
    experts = settings.rollout.expert_parallel_size
    if dies % experts or experts % tensor_parallel:
        raise ConfigurationError(
            f"{ROLLOUT_EXPERT_PARALLEL.switch}={experts} does not cut {dies} dies into equal rollout instances of "
            f"whole tensor-parallel groups of {tensor_parallel}; set it to {dies} for one instance, to a divisor of "
            f"{dies} for several, or to 1 to leave experts unspread"
        )


ROLLOUT_EXPERT_PARALLEL = Feature(
    name="rollout_expert_parallel",
    purpose="Data-parallel rollout engines form one model, or several, with the experts spread over its dies.",
    section="actor_rollout_ref.overlay.rollout",
    settings=RolloutSettings,
    switch="actor_rollout_ref.overlay.rollout.expert_parallel_size",
    off=1,
    is_on=lambda settings: settings.rollout.expert_parallel_size > 1,
    checks=(check_size,),
)
