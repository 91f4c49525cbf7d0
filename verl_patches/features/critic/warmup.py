"""Steps of `trainer.critic_warmup`, which end with the update of the critic: no update of the actor follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Update = Callable[[Any], Any]

ENDS_STEP = "critic_ends_step"
"""The key of a batch's meta information under which the driver says so to the workers."""


def in_warmup(trainer: Any) -> bool:
    """Whether the step that verl's trainer is in belongs to the warm-up of its critic."""
    return trainer.global_steps < trainer.config.trainer.get("critic_warmup", 0)


def ending_warmup(trainer: Any, ending: Callable[[Update], Update]) -> Callable[[Update], Update]:
    """What lets an update of the trainer's critic end the steps of the warm-up.

    ending: makes of a call of the workers' update the one that ends a step.
    """

    def around(update: Update) -> Update:
        last = ending(update)

        def update_critic(batch: Any) -> Any:
            ends = in_warmup(trainer)
            batch.meta_info[ENDS_STEP] = ends
            return (last if ends else update)(batch)

        return update_critic

    return around


def ends_step(meta_info: Mapping[str, Any]) -> bool:
    """Whether the update of this batch is the last one of its step."""
    return bool(meta_info.get(ENDS_STEP, False))
