"""Processes that vLLM spawns, in which the overlay is active before vLLM is imported.

A spawned process unpickles its process object. Looking up the class of that object imports this module and so activates
the overlay; only then is vLLM's target unpickled, and vLLM imported.
"""

from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import overlay
from verl_patches.features import settings

overlay.activate()


class PatchedSpawnProcess(SpawnProcess):
    """A spawned process with the active settings of its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings.current()

    def run(self) -> None:
        """Activate the settings and run the target."""
        settings.activate(self._settings)
        super().run()


class PatchedSpawnContext(SpawnContext):
    """Python's spawn context with processes of that kind."""

    Process = PatchedSpawnProcess
