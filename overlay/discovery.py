"""Find and load the patch files of the patch packages.

A patch file has a line that begins with one of the declaring decorators. Features are declared in the folder
`features` of a patch package. Everything else there is never imported from here, so a patch package may hold modules
that are expensive to import.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from overlay.declaration import Patch, declared
from overlay.feature import Feature

DECORATORS = ("wrap", "replace", "add", "register", "before_import", "provide")
_DECLARING_LINES = tuple(f"\n@{prefix}{name}(" for name in DECORATORS for prefix in ("", "overlay."))


_FEATURE = re.compile(r"^[A-Z]\w* = (overlay\.)?Feature\(", re.MULTILINE)


def patch_files(packages: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Return the module name and path of every patch file, package by package and then in the order of the paths."""
    return _files(packages, "", _declares)


def load_features(packages: Iterable[str]) -> list[Feature]:
    """Import the files in the folders `features` that declare features; returns these in order of paths and lines."""
    found: dict[int, Feature] = {}
    for module_name, _ in _files(packages, "features", _declares_feature):
        values = vars(importlib.import_module(module_name)).values()
        found.update({id(value): value for value in values if isinstance(value, Feature)})
    return list(found.values())


def load_middleware(names: Iterable[str]) -> list[Feature]:
    """Import the lists named `module:NAME` and return the feature of every entry."""
    lists = [name.partition(":") for name in names]
    return [entry.feature for module, _, name in lists for entry in getattr(importlib.import_module(module), name)]


def package_folders(package: str) -> list[Path]:
    """Return the folders of a patch package, without importing it; none if it does not exist."""
    if "." in package:
        raise ValueError(f"a patch package is a top-level folder, not {package!r}")
    if package in sys.modules:
        return [Path(entry) for entry in getattr(sys.modules[package], "__path__", [])]
    spec = importlib.machinery.PathFinder.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(entry) for entry in spec.submodule_search_locations]


def load(packages: Iterable[str]) -> list[Patch]:
    """Import every patch file and return what was declared, ordered by file and line, whatever was imported before."""
    positions: dict[str, int] = {}
    for module_name, _ in patch_files(packages):
        importlib.import_module(module_name)
        positions[module_name] = len(positions)
    found = [patch for patch in declared() if patch.declared_in in positions]
    return sorted(found, key=lambda patch: (positions[patch.declared_in], patch.line))


def _files(packages: Iterable[str], below: str, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    for package in packages:
        for folder in package_folders(package):
            for file in sorted(_python_files(str(folder / below))):
                with open(file, encoding="utf-8") as opened:
                    if wanted(opened.read()):
                        yield _module_name(package, folder, Path(file)), Path(file)


def _python_files(folder: str) -> Iterator[str]:
    """Return the Python files below a folder, without following links to folders. Much faster than pathlib."""
    for place, _, names in os.walk(folder):
        yield from (os.path.join(place, name) for name in names if name.endswith(".py"))


def _declares_feature(text: str) -> bool:
    return _FEATURE.search(text) is not None


def _declares(text: str) -> bool:
    return "overlay" in text and any(line in "\n" + text for line in _DECLARING_LINES)


def _module_name(package: str, folder: Path, file: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
