"""Registers this project's trainers in the process that imports verl's; all others import nothing more.

verl imports the modules in VERL_USE_EXTERNAL_MODULES in each of its processes. The trainers import Megatron-core, which
vLLM's workers do not need and which training must import after MindSpeed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TRAINERS, _OWN = "verl.trainer.ppo.v1", "verl_plugin.onpolicy.trainer"


class _BehindTrainers(MetaPathFinder):
    """Finds verl's trainers once, as Python does, and imports this project's right after them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if name != _TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def with_own(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(_OWN)

        spec.loader.exec_module = with_own  # type: ignore[method-assign]  # of this one loader
        return spec


if _TRAINERS in sys.modules:
    importlib.import_module(_OWN)
else:
    sys.meta_path.insert(0, _BehindTrainers())
