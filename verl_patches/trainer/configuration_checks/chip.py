"""Rejects jobs that need an Atlas A3 and run on another chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from post_training.chips import family_of_this_machine
from verl_patches.features.rollout_parallel.feature import require_fused_exchange


def check_chip(config: Mapping[str, Any], family: str | None = None) -> None:
    """Check that the job's dies can run the rollout's expert parallelism.

    Args:
        config: plain values, every reference followed.
        family: A2 or A3, if the dies are not those of this machine.

    Raises:
        ConfigurationError: experts are spread over Atlas A2 dies, which cannot exchange their tokens.
    """
    node = config["actor_rollout_ref"]
    dies = node["overlay"]["rollout"]["expert_parallel_size"]
    additional = (node["rollout"]["engine_kwargs"]["vllm"] or {}).get("additional_config") or {}
    if dies > 1:
        graph = bool((additional.get("torchair_graph_config") or {}).get("enabled"))
        require_fused_exchange(family or family_of_this_machine(), dies, graph)
