"""Acts on the import of modules that belong to others, without importing them."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable


class _LoaderThenAction(importlib.abc.Loader):
    """Loads a module as its own loader does, then runs an action."""

    def __init__(self, loader, action: Callable[[], None]):
        self._loader = loader
        self._action = action

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._action()

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Serves stand-ins for missing modules and runs actions after imports."""

    def __init__(self):
        self.actions: dict[str, Callable[[], None]] = {}
        self.stand_ins: dict[str, str] = {}

    def find_spec(self, name, path=None, target=None):
        if name in self.stand_ins:
            origin = importlib.util.find_spec(self.stand_ins[name]).origin
            return importlib.util.spec_from_file_location(name, origin)
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThenAction(spec.loader, action)
        return spec


_finder = _Finder()


def after_import(name: str, action: Callable[[], None]) -> None:
    """Run `action` once the module `name` has been imported; at once if it already has been."""
    if name in sys.modules:
        action()
        return
    _finder.actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def stand_in(name: str, source: str) -> None:
    """Make ``import name`` execute the source file of the module `source` under that name."""
    _finder.stand_ins[name] = source
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
