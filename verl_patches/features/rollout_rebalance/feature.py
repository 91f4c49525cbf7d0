"""The feature rollout_rebalance: its configuration and its switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL

_GRAPH = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.torchair_graph_config"
_SCHEDULER = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.ascend_scheduler_config"


@dataclass(frozen=True)
class RolloutRebalanceSettings:
    """At the end of a lease, move unfinished requests from full engines to empty ones where all can then run a smaller
    graph. Their keys and values are computed again, and every request draws its own random numbers."""

    enabled: bool = False


def check_rebalance(config: Mapping[str, Any], settings: Any) -> None:
    """Requests move between leases, and only into smaller graphs."""
    if not settings.rollout_rebalance.enabled:
        return
    switch, node = ROLLOUT_REBALANCE.switch, config["actor_rollout_ref"]["rollout"]
    if not settings.dp_sync.enabled:
        raise ConfigurationError(
            f"{switch}=true needs {DP_SYNC.switch}=true, at whose agreements requests move; set it, or switch "
            "rollout_rebalance off"
        )
    experts, tensor_parallel = settings.rollout.expert_parallel_size, node["tensor_model_parallel_size"]
    if experts <= tensor_parallel:
        raise ConfigurationError(
            f"{switch}=true needs several engines that form one model, and {ROLLOUT_EXPERT_PARALLEL.switch}={experts} "
            f"with actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel} gives one; raise the first, "
            "or switch rollout_rebalance off"
        )
    vllm = (node.get("engine_kwargs") or {}).get("vllm") or {}
    additional = vllm.get("additional_config") or {}
    graph, scheduler = (additional.get(name) or {} for name in ("torchair_graph_config", "ascend_scheduler_config"))
    sizes = graph.get("graph_batch_sizes") or ()
    if not graph.get("enabled") or len(set(sizes)) < 2:
        raise ConfigurationError(
            f"{switch}=true needs graphs of several sizes, and {_GRAPH} has enabled={bool(graph.get('enabled'))} and "
            f"graph_batch_sizes={list(sizes)}; give it sizes such as [1,2,4,8], or switch rollout_rebalance off"
        )
    if not scheduler.get("enabled") or scheduler.get("enable_chunked_prefill"):
        raise ConfigurationError(
            f"{switch}=true needs whole prompts: a part of a prompt draws random numbers that vLLM-Ascend takes "
            f"back by a guess; set {_SCHEDULER}.enabled=true, enable_chunked_prefill=false there, or switch "
            "rollout_rebalance off"
        )


ROLLOUT_REBALANCE = Feature(
    name="rollout_rebalance",
    purpose="Unfinished requests move from full rollout engines to empty ones, so that all run smaller graphs.",
    section="actor_rollout_ref.overlay.rollout_rebalance",
    settings=RolloutRebalanceSettings,
    switch="actor_rollout_ref.overlay.rollout_rebalance.enabled",
    is_on=lambda settings: settings.rollout_rebalance.enabled,
    checks=(check_rebalance,),
)
