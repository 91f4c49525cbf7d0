"""Guards the updates of verl's Megatron models: those with non-finite gradients are skipped and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from post_training.finite_steps.guard import NonfiniteGuard
from post_training.finite_steps.weights import check_weights
from post_training.live_tensors import gradient_tensors
from verl_patches.features.measure.step_record import current_record

Metrics = dict[str, Any]

_REMEDY = "set actor_rollout_ref.overlay.nonfinite.enabled=False to train with it"


def guarded(trained: Any, role: str, update: Callable[[], Metrics]) -> Metrics:
    """Run `update` with a guard around the optimizer of `trained`; return its metrics.

    Args:
        trained: verl's actor or critic, with its model and optimizer in attributes that begin with `role`.
        role: actor or critic.
        update: verl's update.

    Raises:
        NonfiniteWeightsError: an update was skipped, and the weights hold inf or nan.
    """
    name, module = f"{role}_optimizer", getattr(trained, f"{role}_module")
    optimizer = getattr(trained, name)
    guard = NonfiniteGuard(optimizer, lambda: gradient_tensors(module), remedy=_REMEDY)
    setattr(trained, name, guard)
    try:
        metrics = update()
    finally:
        setattr(trained, name, optimizer)
        current_record().count(f"{role}/nonfinite_steps", guard.skipped)
    if guard.skipped:  # on all ranks or on none; with bad weights every later update would be skipped too
        check_weights(module, f"after a skipped update, the {role}'s weights", "begin from earlier weights")
    return metrics
