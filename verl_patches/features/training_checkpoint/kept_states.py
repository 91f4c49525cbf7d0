"""States of the driver that other features keep in a checkpoint, as JSON values by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from post_training.process_context import process_context


class KeptStates:
    """States that are read when a checkpoint is written, and restored when a run resumes from it.

    `read` is called on the driver after the step's metrics have been logged; `restore` is called before the first step
    of the resumed run, unless the checkpoint has nothing under the name. Registering a name again replaces it.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register(self, name: str, read: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """Keep what `read` returns, JSON values, under `name`."""
        self._known[name] = (read, restore)

    def read(self) -> dict[str, Any]:
        """Return all states by name."""
        return {name: read() for name, (read, _) in self._known.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore those of `states` whose names are registered."""
        for name, (_, restore) in self._known.items():
            if name in states:
                restore(states[name])


def process_kept_states() -> KeptStates:
    """Return the kept states of this process."""
    return process_context().of(KeptStates)
