"""Objects that a process keeps between two calls of verl, which has no argument to pass them."""

from __future__ import annotations

from typing import Any, TypeVar

Part = TypeVar("Part")


class ProcessContext:
    """Holds at most one object of each class."""

    def __init__(self) -> None:
        self._parts: dict[type, Any] = {}

    def of(self, kind: type[Part]) -> Part:
        """Return the object of this class; if there is none, make one without arguments."""
        found = self.find(kind)
        return self._parts.setdefault(kind, kind()) if found is None else found

    def find(self, kind: type[Part]) -> Part | None:
        """Return the object of this class, if there is one."""
        return self._parts.get(kind)

    def keep(self, part: Part) -> Part:
        """Make `part` the object of its class, in place of an earlier one, and return it."""
        self._parts[type(part)] = part
        return part

    def take(self, kind: type[Part]) -> Part:
        """Remove and return the object of this class: the next `of` makes another."""
        found = self.of(kind)
        del self._parts[kind]
        return found


_context = ProcessContext()


def process_context() -> ProcessContext:
    """Return the context of this process, which all its workers share."""
    return _context
