"""Truncated importance sampling between rollout and training (Yao et al., 2025, "Your efficient RL framework secretly
brings you off-policy RL training").

The rollout samples from p_rollout, which differs from training's p_old only by kernels and rounding. The gradient of a
token is corrected by the factor w = min(p_old / p_rollout, cap). Every term of a token's PPO loss (the ratio's, the
clipped one's and the dual clip's) is linear in the token's advantage, and w is not negative, so that scaling the
advantage by w scales the loss by w.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

NEEDED = ("old_log_probs", "rollout_log_probs", "advantages")


def truncated_ratios(old: torch.Tensor, rollout: torch.Tensor, cap: float) -> torch.Tensor:
    """Return min(exp(old - rollout), cap) for log-probs of the same shape; a ratio that overflows gives the cap too."""
    return (old - rollout).exp().clamp(max=cap)


def corrected(batch: Any, cap: float) -> tuple[Any, dict[str, float]]:
    """Return a copy of `batch`, a `DataProto` as verl's loop passes it to the update, with weighted advantages; and the
    metrics of the weights.

    The batch itself is not changed.

    Raises:
        KeyError: a column of `NEEDED` is missing.
    """
    from verl import DataProto

    old, rollout, advantages = (batch.batch[name] for name in NEEDED)
    counted = batch.batch["attention_mask"][:, -advantages.size(1) :].bool()
    weights = truncated_ratios(old, rollout, cap)
    tensors = batch.batch.clone(recurse=False)
    # After the end of an answer neither log-prob means anything.
    tensors["advantages"] = torch.where(counted, advantages * weights, advantages)
    logs = (old - rollout)[counted]
    metrics = {
        "rollout_correction/weight_mean": weights[counted].mean().item(),
        "rollout_correction/ratio_max": logs.max().exp().item(),
        # Compare the difference of log-probs itself: its exponential in float32 is rounded to the cap from either side.
        "rollout_correction/capped_share": (logs.double() > math.log(cap)).double().mean().item(),
    }
    return DataProto(batch=tensors, non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info), metrics


def correcting(update_actor: Callable[[Any], Any], cap: float) -> Callable[[Any], Any]:
    """Wrap verl's call of the workers' update to correct advantages and to report the metrics of the weights."""

    def update(batch: Any) -> Any:
        batch, metrics = corrected(batch, cap)
        output = update_actor(batch)
        output.meta_info["metrics"].update(metrics)
        return output

    return update
