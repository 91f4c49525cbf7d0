"""The driver's side of a recording, from the first generation of a chosen step to the end of its update."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class ProfiledSteps:
    """Starts the recording of a chosen step on all workers before they generate for it, and ends it after the update.

    Args:
        steps: numbers of the chosen steps.
        now: returns the number of the driver's current step.
        tell: the workers' `profile_step`.
    """

    def __init__(self, steps: Collection[int], now: Callable[[], int], tell: Callable[[int | None], Any]) -> None:
        self._steps, self._now, self._tell = steps, now, tell
        self._recorded: int | None = None

    def beginning_first(self, generate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the workers' generation to begin a recording with the step's first batch; validation begins none."""

        def generate_sequences(batch: Any) -> Any:
            step = self._now()
            if step in self._steps and self._recorded != step and not batch.meta_info.get("validate", False):
                self._tell(step)
                self._recorded = step
            return generate(batch)

        return generate_sequences

    def ending_after(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the workers' update to end the step's recording after it."""

        def update_actor(batch: Any) -> Any:
            output = update(batch)
            if self._recorded == self._now():
                self._tell(None)
            return output

        return update_actor
