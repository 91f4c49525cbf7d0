"""Stand-ins, built on first use, for modules that upstream imports and that do not exist here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from overlay.targets import source_file


def is_present(name: str) -> bool:
    """Whether the module is imported already or could be."""
    if name in sys.modules:
        return True
    try:
        return source_file(name) is not None
    except ModuleNotFoundError:
        return False


class ProvidedModule(ModuleType):
    """A module that gets its content from `build(name)` on the first read; its parents stay absent."""

    def __init__(self, name: str, build: Callable[[str], ModuleType]) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None)
        self.__dict__["_build"] = build

    def __getattr__(self, name: str) -> Any:
        probe = name.startswith("__") and name != "__all__"
        build = None if probe else self.__dict__.pop("_build", None)
        if build is not None:
            self._fill(build)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r}, which the overlay provides, has no {name!r}")

    def _fill(self, build: Callable[[str], ModuleType]) -> None:
        try:
            content = vars(build(self.__name__))
        except BaseException:
            self.__dict__["_build"] = build
            raise
        self.__dict__.update({key: value for key, value in content.items() if key == "__all__" or key[:2] != "__"})


def install(name: str, build: Callable[[str], ModuleType]) -> ModuleType:
    """Make `name` importable with `from name import ...`."""
    module = ProvidedModule(name, build)
    sys.modules[name] = module
    return module
