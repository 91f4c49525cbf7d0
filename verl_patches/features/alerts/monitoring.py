"""`monitoring_config` as guides to verl write it: names of metrics, thresholds of some, and the name of a dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "monitoring_config"
MONITORED = {
    "reward_score": "critic/score/mean",
    "kl_divergence": "actor/kl_loss",
    "entropy": "actor/entropy_loss",
    "gpu_utilization": "perf/mfu/actor",
    "memory_usage": "memory/peak_bytes/update",
}
"""Metrics in metrics.jsonl, by their names in `monitoring_config`."""
_CONDITIONS = {"reward_score": "below", "kl_divergence": "above", "entropy": "below"}


def threshold_rules(monitoring: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return rules by name, as `read_rules` takes them: one for each threshold, met at the first step beyond it."""
    thresholds = ((monitoring or {}).get("alerting") or {}).get("threshold") or {}
    return {
        name: {"metric": MONITORED[name], _CONDITIONS[name]: limit}
        for name, limit in thresholds.items()
        if limit is not None
    }


def asked_for(monitoring: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the metrics that `monitoring_config` asks for, by the name to use in a message."""
    return {f"{KEY}.metrics: {name}": MONITORED[name] for name in (monitoring or {}).get("metrics") or ()}
