"""States of the driver that other features keep in a checkpoint: each under a name, as JSON holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from post_training.process_context import process_context


class KeptStates:
    """What is read when a checkpoint is written, and given back when a run goes on from it.

    `read` is called on the driver after the step's metrics have been logged; `restore` before the first step of the run
    that goes on, and not where the checkpoint has nothing under the name. A name that is registered again is replaced.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register(self, name: str, read: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """Keep what `read` returns, as JSON holds it, under `name`."""
        self._known[name] = (read, restore)

    def read(self) -> dict[str, Any]:
        """All of them by name."""
        return {name: read() for name, (read, _) in self._known.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give back those of `states` that somebody here knows."""
        for name, (_, restore) in self._known.items():
            if name in states:
                restore(states[name])


def process_kept_states() -> KeptStates:
    """Those of this process."""
    return process_context().of(KeptStates)
