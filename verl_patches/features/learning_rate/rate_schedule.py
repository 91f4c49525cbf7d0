"""Stateless learning rate schedules: the rates of verl's FSDP schedulers, computed from the step's number alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, pi
from typing import Any

CONSTANT, LINEAR, COSINE = "constant", "linear", "cosine"


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run.

    Attributes:
        peak: the configured rate.
        style: CONSTANT, LINEAR or COSINE, the course after the warm-up.
        warmup_steps: steps before `peak` is reached.
        total_steps: steps of the run, at which LINEAR and COSINE end.
        minimum_ratio: share of `peak` at which LINEAR and COSINE begin their warm-up and end. CONSTANT warms up from 0.
    """

    peak: float
    style: str
    warmup_steps: int
    total_steps: int
    minimum_ratio: float

    @classmethod
    def of(cls, optim: Mapping[str, Any]) -> Schedule:
        """Read verl's `actor.optim` as verl's FSDP worker reads it: `lr_warmup_steps` counts where it is not negative,
        and otherwise `lr_warmup_steps_ratio` of `total_training_steps`, which the trainer fills in."""
        total = int(optim.get("total_training_steps", -1))
        warmup = int(optim.get("lr_warmup_steps", -1))
        if warmup < 0:
            warmup = int(optim.get("lr_warmup_steps_ratio", 0.0) * total)
        style, ratio = optim.get("warmup_style", CONSTANT), optim.get("min_lr_ratio") or 0.0
        return cls(optim["lr"], style, max(warmup, 0), total, ratio)

    @property
    def is_constant(self) -> bool:
        """Whether every step has the same rate."""
        return self.style == CONSTANT and self.warmup_steps == 0

    def rate(self, step: int) -> float:
        """Return the learning rate of the updates of `step`, counted from 1 as verl counts its steps.

        The formulas are those of `transformers.get_linear_schedule_with_warmup` and of
        `verl.utils.torch_functional.get_cosine_schedule_with_warmup`, with `step - 1` steps taken before: the first
        step of a warm-up from 0 therefore changes no weight, as with verl's FSDP workers. For 10 steps with 2 of
        warm-up and a peak of 1, LINEAR gives 0, 0.5, 1, 0.875, 0.75, ..., 0.125.
        """
        before, floor = step - 1, 0.0 if self.style == CONSTANT else self.minimum_ratio
        if before < self.warmup_steps:
            return self.peak * (floor + (1 - floor) * (before / self.warmup_steps))
        if self.style == CONSTANT:
            return self.peak
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        if self.style == LINEAR:
            return self.peak * max(floor, floor + (1 - floor) * ((self.total_steps - before) / decay_steps))
        progress = (before - self.warmup_steps) / decay_steps
        return self.peak * max(floor, (1 + floor) / 2 + (1 - floor) / 2 * cos(pi * progress))
