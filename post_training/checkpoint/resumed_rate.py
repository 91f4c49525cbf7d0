"""Resumes the schedule of a learning rate."""

from __future__ import annotations

import torch


def set_place_in_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: int) -> None:
    """Set `scheduler` to its state after `steps` steps; its rates must depend only on the number of steps."""
    rates = [base * rule(steps) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict(
        {**scheduler.state_dict(), "last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
    )
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
