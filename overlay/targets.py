"""The place of a target: its holder (module, class or object), its name there, and the raw object stored under it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from overlay.errors import TargetError

ABSENT = object()


@dataclass(frozen=True)
class Place:
    """A name in a holder. `owned` is false if a class only inherits the name."""

    holder: Any
    name: str
    raw: Any
    owned: bool

    @property
    def exists(self) -> bool:
        """Whether upstream has anything there."""
        return self.raw is not ABSENT


def find(module: ModuleType, qualified_name: str) -> Place:
    """Look a target up without running descriptors.

    Raises:
        TargetError: a holder on the way does not exist. A missing last name is a Place that does not exist.
    """
    *path, name = qualified_name.split(".")
    holder: Any = module
    for depth, part in enumerate(path):
        place = _lookup(holder, part)
        if not place.exists:
            raise TargetError(f"{module.__name__} has no {'.'.join(path[: depth + 1])}")
        holder = getattr(holder, part)
    return _lookup(holder, name)


def _lookup(holder: Any, name: str) -> Place:
    if isinstance(holder, type):
        for owner in holder.__mro__:
            if name in vars(owner):
                return Place(holder, name, vars(owner)[name], owner is holder)
        return Place(holder, name, ABSENT, False)
    own = getattr(holder, "__dict__", {})
    if name in own:
        return Place(holder, name, own[name], True)
    if isinstance(holder, ModuleType):
        return Place(holder, name, ABSENT, False)
    return Place(holder, name, getattr(holder, name, ABSENT), False)


def defined_elsewhere(module: ModuleType, qualified_name: str, raw: Any) -> str:
    """Return the target that really defines a function or class if this is only an imported copy; else empty."""
    home_name, home_path = getattr(raw, "__module__", None), getattr(raw, "__qualname__", None)
    home = sys.modules.get(home_name) if isinstance(home_name, str) else None
    if home is None or home is module or not isinstance(home_path, str) or "<locals>" in home_path:
        return ""
    try:
        place = find(home, home_path)
    except TargetError:
        return ""
    return f"{home_name}:{home_path}" if place.raw is raw else ""


def source_file(module_name: str) -> Path | None:
    """Find the file of a module without importing it or its parents; None if there is none.

    Raises:
        ModuleNotFoundError: the top-level package is not installed at all.
    """
    parent, _, name = module_name.rpartition(".")
    if not parent:
        return _origin(_top_level(name))
    for folder in _folders(parent):
        # Nearly always one of these; asking the import system takes many times as long.
        for file in (os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py")):
            if os.path.isfile(file):
                return Path(file)
    return _origin(_found(module_name))


@functools.cache
def _folders(package: str) -> tuple[str, ...]:
    """Return the folders in which a package's modules are looked for; none if there is no such package."""
    parent, _, name = package.rpartition(".")
    if not parent:
        return tuple(_top_level(name).submodule_search_locations or ())
    usual = [os.path.join(folder, name) for folder in _folders(parent)]
    found = [folder for folder in usual if os.path.isfile(os.path.join(folder, "__init__.py"))]
    if found:
        return tuple(found[:1])
    spec = _found(package)
    if spec is None:
        return tuple(folder for folder in usual if os.path.isdir(folder))
    return tuple(spec.submodule_search_locations or ())


def _found(name: str) -> ModuleSpec | None:
    """Return the spec that the import system finds, if any.

    None also for a folder without __init__.py in a package that is not imported.
    """
    try:
        return PathFinder.find_spec(name, list(_folders(name.rpartition(".")[0])))
    except KeyError:  # such a namespace asks its loaded parent package for its path
        return None


def forget_folders() -> None:
    """Search for packages anew; call this when the import path may have changed."""
    _folders.cache_clear()


def _top_level(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"no package named {name}", name=name)
    return spec


def _origin(spec: ModuleSpec | None) -> Path | None:
    return Path(spec.origin) if spec and spec.origin else None
