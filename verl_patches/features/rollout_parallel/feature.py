"""The feature rollout_expert_parallel: its configuration, its switch, and the supported sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay import ConfigurationError, Feature
from post_training.chips import A2

# Numbers of dies that CANN's fused exchange of tokens supports on an Atlas A2; on an Atlas A3 it supports 2 and more
# (aclnnMoeDistributeDispatchV2: epWorldSize). vLLM-Ascend uses it in graphs, and everywhere from 16 dies on.
SIZES_OF_A2 = (16, 32, 64, 128, 192, 256, 384)
_GRAPH = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.torchair_graph_config.enabled"


@dataclass(frozen=True)
class RolloutSettings:
    """How the rollout spreads experts: expert_parallel_size dies (TP x DP) form one instance of the model, and the dies
    divide into such instances. 1 leaves vLLM's expert parallelism off."""

    expert_parallel_size: int = field(default=1, metadata={"at_least": 1})


def check_size(config: Mapping[str, Any], settings: Any) -> None:
    """Check that the dies divide into instances of the rollout, and an instance into whole tensor-parallel groups."""
    dies = config["trainer"]["n_gpus_per_node"] * config["trainer"]["nnodes"]
    tensor_parallel = config["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"]
    experts = settings.rollout.expert_parallel_size
    if dies % experts or experts % tensor_parallel:
        raise ConfigurationError(
            f"{ROLLOUT_EXPERT_PARALLEL.switch}={experts} does not divide {dies} dies into equal rollout instances of "
            f"whole tensor-parallel groups of {tensor_parallel}. Set it to {dies} for one instance, to a divisor of "
            f"{dies} for several, or to 1 to leave experts unspread"
        )


def require_fused_exchange(family: str | None, dies: int, in_graph: bool) -> None:
    """Reject a number of dies over which chips of `family` cannot exchange the tokens of experts.

    Args:
        family: A2 or A3; None if it is not known, which rejects nothing.
        dies: number of dies that share the experts of one instance.
        in_graph: whether the rollout decodes in a graph, which can hold no other exchange.

    Raises:
        ConfigurationError: the fused operator of an Atlas A2 would be used on an unsupported number of dies.
    """
    least = SIZES_OF_A2[0]
    if family != A2 or dies in SIZES_OF_A2 or (dies < least and not in_graph):
        return
    sizes = ", ".join(map(str, SIZES_OF_A2))
    if dies < least:
        raise ConfigurationError(
            f"{_GRAPH}=true is invalid: experts are on {dies} dies of an Atlas A2, whose fused exchange of tokens, the "
            f"only one that works in a graph, needs {sizes}. Set it to false with +graph=off, or "
            f"{ROLLOUT_EXPERT_PARALLEL.switch} to one of these"
        )
    raise ConfigurationError(
        f"{ROLLOUT_EXPERT_PARALLEL.switch}={dies} is invalid: the fused exchange of tokens of an Atlas A2 needs "
        f"{sizes} dies. Set it to one of these"
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
