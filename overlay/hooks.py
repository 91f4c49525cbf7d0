"""Run code before and after chosen modules are executed, on every import and every reload of them.

Unlike post-import hooks that fire once, these also fire on `importlib.reload`, and they know a module whose import is
still under way when the hooks are installed, which is the case for the module that holds the prelude line.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from overlay.errors import TargetError

Before = Callable[[str], None]
After = Callable[[ModuleType], None]


class HookFinder:
    """A meta-path finder that lets the other finders find a module and only adds the two calls around its execution."""

    def __init__(self, modules: Iterable[str], before: Before, after: After) -> None:
        self.modules = frozenset(modules)
        self.before = before
        self.after = after
        self._searching = threading.local()

    def install(self) -> None:
        """Put this finder before all others."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take this finder out again."""
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec, with a loader that makes the two calls; None for other modules.

        Raises:
            TargetError: the module has nothing to execute (a namespace package), so that no hook could ever run.
        """
        searching = self._searching.__dict__.setdefault("names", set())
        if name not in self.modules or name in searching:
            return None
        searching.add(name)
        try:
            spec = self._from_others(name, path, target)
        finally:
            searching.discard(name)
        if spec is None:
            return None
        if spec.loader is None or not hasattr(spec.loader, "exec_module"):
            raise TargetError(f"{name} is a namespace package or has no loader, so nothing in it can be patched")
        spec.loader = HookLoader(spec.loader, self)  # type: ignore[assignment]  # it hands on what it does not change
        return spec

    def _from_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find else None
            if spec is not None:
                return spec
        return None


class HookLoader:
    """Stands in for a loader until execution begins, then gives the module its own loader back."""

    def __init__(self, loader: Any, finder: HookFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as the real loader does, between the two calls."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.before(module.__name__)
        self._loader.exec_module(module)
        self._finder.after(sys.modules.get(module.__name__, module))


def import_under_way(module: ModuleType) -> bool:
    """Whether the module's own code is still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def when_import_ends(module: ModuleType, call: After) -> None:
    """Call `call(module)` once the import in progress ends. Its exceptions come out of that import statement."""
    spec = module.__spec__
    assert spec is not None
    vars(spec)["when_import_ends"] = (module, call)
    spec.__class__ = _AnnouncingSpec


class _AnnouncingSpec(ModuleSpec):
    """A spec that notices when the import machinery clears `_initializing`, and then becomes an ordinary one again.

    The flag is how the import system itself marks a module whose code is running (importlib/_bootstrap.py, _load).
    """

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            module, call = vars(self).pop("when_import_ends")
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # its base: nothing else has to notice
            if module.__name__ in sys.modules:
                call(module)
