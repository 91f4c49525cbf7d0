"""The feature rollout_rebalance: its configuration and its switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlay import ConfigurationError, Feature
from verl_patches.features.dp_sync.feature import DP_SYNC
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.rollout_parallel.feature import ROLLOUT_EXPERT_PARALLEL

_GRAPH = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.torchair_graph_config"


@dataclass(frozen=True)
class RolloutRebalanceSettings:
    """At the end of a window, move unfinished requests from full engines to empty ones where all can then run a smaller
    graph. Their keys and values are computed again. Needs request_noise."""

    enabled: bool = False


def check_rebalance(config: Mapping[str, Any], settings: Any) -> None:
    """Check the settings that migration needs: dp_sync, request_noise, several engines, graphs of several sizes."""
    if not settings.rollout_rebalance.enabled:
        return
    switch, node = ROLLOUT_REBALANCE.switch, config["actor_rollout_ref"]["rollout"]
    if not settings.dp_sync.enabled:
        raise ConfigurationError(
            f"{switch}=true needs {DP_SYNC.switch}=true, because requests move at its agreements. Set it, or switch "
            "rollout_rebalance off"
        )
    if not settings.request_noise.enabled:
        raise ConfigurationError(
            f"{switch}=true needs {REQUEST_NOISE.switch}=true, or samples depend on the engine that runs the request. "
            "Set it, or switch rollout_rebalance off"
        )
    experts, tensor_parallel = settings.rollout.expert_parallel_size, node["tensor_model_parallel_size"]
    if experts <= tensor_parallel:
        raise ConfigurationError(
            f"{switch}=true needs several engines that form one model, but {ROLLOUT_EXPERT_PARALLEL.switch}={experts} "
            f"with actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel} makes one. Raise the first, "
            "or switch rollout_rebalance off"
        )
    vllm = (node.get("engine_kwargs") or {}).get("vllm") or {}
    additional = vllm.get("additional_config") or {}
    graph = additional.get("torchair_graph_config") or {}
    sizes = graph.get("graph_batch_sizes") or ()
    if not graph.get("enabled") or len(set(sizes)) < 2:
        raise ConfigurationError(
            f"{switch}=true needs graphs of several sizes, but {_GRAPH} has enabled={bool(graph.get('enabled'))} and "
            f"graph_batch_sizes={list(sizes)}. Set it to sizes such as [1,2,4,8], or switch rollout_rebalance off"
        )


ROLLOUT_REBALANCE = Feature(
    name="rollout_rebalance",
    purpose="Unfinished requests move from full rollout engines to empty ones, so all run smaller graphs.",
    section="actor_rollout_ref.overlay.rollout_rebalance",
    settings=RolloutRebalanceSettings,
    checks=(check_rebalance,),
)
