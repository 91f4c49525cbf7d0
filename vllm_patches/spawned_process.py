"""Processes that vLLM spawns, with the overlay in them before anything of vLLM.

A spawned process unpickles its process object. The class of that object is looked up first, which imports this module
and so turns the overlay on; what vLLM wants to run there is unpickled, and vLLM imported, only after that.
"""

from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import overlay
from verl_patches.features import settings

overlay.activate()


class PatchedSpawnProcess(SpawnProcess):
    """A spawned process in which the settings of its parent are in force."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings.current()

    def run(self) -> None:
        """Put the settings in force and run the target."""
        settings.activate(self._settings)
        super().run()


class PatchedSpawnContext(SpawnContext):
    """Python's spawn context with processes of that kind."""

    Process = PatchedSpawnProcess
