"""The driver's side of a recording: it begins with the first generation of a chosen step and ends with its update."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class ProfiledSteps:
    """Tells all workers which step to record, before they generate for it and after they have updated.

    steps: the chosen numbers. now: the number of the step that the driver is at. tell: the workers' `profile_step`.
    """

    def __init__(self, steps: Collection[int], now: Callable[[], int], tell: Callable[[int | None], Any]) -> None:
        self._steps, self._now, self._tell = steps, now, tell
        self._recorded: int | None = None

    def beginning_first(self, generate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The workers' generation; a validation's begins nothing, and later batches of a step are in its recording."""

        def generate_sequences(batch: Any) -> Any:
            step = self._now()
            if step in self._steps and self._recorded != step and not batch.meta_info.get("validate", False):
                self._tell(step)
                self._recorded = step
            return generate(batch)

        return generate_sequences

    def ending_after(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The workers' update."""

        def update_actor(batch: Any) -> Any:
            output = update(batch)
            if self._recorded == self._now():
                self._tell(None)
            return output

        return update_actor
