"""Which of the driver's metrics hold for this run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# verl derives these on the driver from old_log_prob and its entropy; without that forward they would be made up.
DERIVED_FROM_OLD_LOG_PROB = (
    "actor/entropy_loss",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_std",
)


def true_metrics(metrics: Mapping[str, Any], old_log_prob_computed: bool) -> dict[str, Any]:
    """`metrics` without the names whose values rest on an old_log_prob that was not computed."""
    if old_log_prob_computed:
        return dict(metrics)
    return {name: value for name, value in metrics.items() if name not in DERIVED_FROM_OLD_LOG_PROB}
