"""Steps of `trainer.critic_warmup`, which end with the critic's update, because no update of the actor follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Update = Callable[[Any], Any]

ENDS_STEP = "critic_ends_step"
"""The key of a batch's meta information that tells the workers that the critic's update ends the step."""


def in_warmup(trainer: Any) -> bool:
    """Return whether the current step of verl's trainer belongs to the warm-up of its critic."""
    return trainer.global_steps < trainer.config.trainer.get("critic_warmup", 0)


def ending_warmup(trainer: Any, ending: Callable[[Update], Update]) -> Callable[[Update], Update]:
    """Return a decorator of the critic's update that lets it end the steps of the warm-up.

    Args:
        trainer: verl's trainer.
        ending: the decorator of an update that ends a step.
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
    """Return whether the critic's update of this batch is the last one of its step."""
    return bool(meta_info.get(ENDS_STEP, False))
