"""Passes the learning rate of a step on: from the driver with the batch, into the optimizer, into the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from verl_patches.features.learning_rate.rate_schedule import Schedule

STEP = "training_step"
"""The key of a batch's meta information under which the driver sends the number of the step, from 1."""


def sending_step(update_model: Callable[[Any], Any], step: Callable[[], int]) -> Callable[[Any], Any]:
    """Wrap verl's call of the workers' update to send the step's number with the batch."""

    def update(batch: Any) -> Any:
        batch.meta_info[STEP] = step()
        return update_model(batch)

    return update


def set_rate(optimizer: Any, optim: Mapping[str, Any], meta_info: Mapping[str, Any]) -> None:
    """Give every parameter group of Megatron's optimizer the rate of the step, times its own multiple.

    Raises:
        KeyError: the rate depends on the step, and the batch does not carry its number.
    """
    schedule = Schedule.of(optim)
    rate = schedule.peak if schedule.is_constant else schedule.rate(meta_info[STEP])
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)


def report_rate(optimizer: Any, metrics: MutableMapping[str, Any], role: str = "actor") -> None:
    """Report the highest rate among the optimizer's groups, under the name that verl's FSDP workers use."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if rates:
        metrics[f"{role}/lr"] = max(rates)
