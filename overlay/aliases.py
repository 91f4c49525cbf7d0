"""Copies of a patched object that upstream took before the patch, as `from x import f` does.

The search covers the module globals of the given packages, the attributes of classes defined there, and dicts and lists
that are module globals (registries). Each copy is named by its place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlay.pins import within

if TYPE_CHECKING:
    import ast

Setter = Callable[[Any], None]


@dataclass(frozen=True)
class Replacement:
    """An object that was in a target's place, the one that is there now, and the class that holds the target (if any).

    `constant` is set, to the target's module and name, if the object is a plain value: values are shared, so an equal
    value counts as a copy only if the module's source imports it.
    """

    old: Any
    new: Any
    owner: type | None = None
    constant: tuple[str, str] | None = None


@dataclass(frozen=True)
class Copy:
    """A place that still holds `replacement.old`."""

    site: str
    replacement: Replacement
    set: Setter

    def rebind(self) -> None:
        """Put the new object there."""
        self.set(self.replacement.new)


def modules_of(packages: Iterable[str], after: str = "") -> list[ModuleType]:
    """Return the imported modules of some packages.

    With `after`, return only that module, whose own registries may hold copies, and those whose import began later:
    while its import ends, only these can have copied from it.
    """
    names = list(sys.modules)
    if after:
        names = names[names.index(after) :]
    tops = {package.partition(".")[0] for package in packages}
    found = (sys.modules.get(name) for name in names if name.partition(".")[0] in tops)
    return [module for module in found if isinstance(module, ModuleType)]


def copies(replacements: Iterable[Replacement], modules: Iterable[ModuleType], packages: Iterable[str]) -> list[Copy]:
    """Return every place in `modules` that still holds a replaced object."""
    wanted = {id(replacement.old): replacement for replacement in replacements}
    packages = tuple(packages)
    seen: set[int] = set()
    found: list[Copy] = []
    for module in modules if wanted else ():
        for name, value in list(vars(module).items()):
            site = f"{module.__name__}:{name}"
            hit = wanted.get(id(value))
            if hit is not None and (hit.constant is None or name in _names_of_constant(module, hit.constant)):
                found.append(Copy(site, hit, _attribute_setter(module, name)))
            if id(value) not in seen and issubclass(type(value), (type, dict, list)):
                seen.add(id(value))
                found.extend(_inside(site, value, wanted, packages))
    return found


def _inside(site: str, value: Any, wanted: Mapping[int, Replacement], packages: tuple[str, ...]) -> Iterator[Copy]:
    if issubclass(type(value), type):
        if any(within(value.__module__, package) for package in packages):
            yield from _in_class(value, wanted)
        return
    # dict's own items(): a lazily filled mapping would import everything it names.
    entries = list(dict.items(value) if issubclass(type(value), dict) else enumerate(value))
    for key, entry in entries:
        hit = wanted.get(id(entry))
        if hit is not None and hit.constant is None:
            yield Copy(f"{site}[{key!r}]", hit, _item_setter(value, key))


def _in_class(holder: type, wanted: Mapping[int, Replacement]) -> Iterator[Copy]:
    for name, raw in list(vars(holder).items()):
        kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
        hit = wanted.get(id(raw)) or (wanted.get(id(raw.__func__)) if kind else None)
        if hit is None or hit.constant is not None or hit.owner is holder:
            continue
        site = f"{holder.__module__}:{holder.__qualname__}.{name}"
        set_raw = _attribute_setter(holder, name)
        put = functools.partial(_put_rewrapped, kind, set_raw) if kind and hit.old is not raw else set_raw
        yield Copy(site, hit, put)


def _put_rewrapped(kind: Callable[[Any], Any], put: Setter, new: Any) -> None:
    put(kind(new))


def _attribute_setter(holder: Any, name: str) -> Setter:
    return lambda new: setattr(holder, name, new)


def _item_setter(container: Any, key: Any) -> Setter:
    return lambda new: container.__setitem__(key, new)


@functools.cache
def _names_of_constant(module: ModuleType, constant: tuple[str, str]) -> frozenset[str]:
    """Return the names under which a module's source imports `constant` (a module and a name in it)."""
    import ast
    import inspect

    origin, constant_name = constant
    try:
        source = inspect.getsource(module)
        tree = ast.parse(source if constant_name in source else "")
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    from_origin = [node for node in imports if _imported_module(node, module.__package__ or "") == origin]
    return frozenset(
        alias.asname or alias.name for node in from_origin for alias in node.names if alias.name == constant_name
    )


def _imported_module(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that an import statement in a module of `package` reads from."""
    parents = package.split(".")
    kept = parents[: len(parents) - node.level + 1] if node.level else []
    return ".".join([*kept, *filter(None, [node.module])])
