"""What a process keeps between two calls of verl, which has no argument for it."""

from __future__ import annotations

from typing import Any, TypeVar

Part = TypeVar("Part")


class ProcessContext:
    """At most one object of each class."""

    def __init__(self) -> None:
        self._parts: dict[type, Any] = {}

    def of(self, kind: type[Part]) -> Part:
        """The object of this class, which is made without arguments if there is none."""
        found = self.find(kind)
        return self._parts.setdefault(kind, kind()) if found is None else found

    def find(self, kind: type[Part]) -> Part | None:
        """The object of this class, if there is one."""
        return self._parts.get(kind)

    def keep(self, part: Part) -> Part:
        """Make `part` the object of its class, in place of an earlier one, and return it."""
        self._parts[type(part)] = part
        return part

    def take(self, kind: type[Part]) -> Part:
        """The object of this class, which is forgotten here: the next `of` makes another."""
        found = self.of(kind)
        del self._parts[kind]
        return found


_context = ProcessContext()


def process_context() -> ProcessContext:
    """That of this process, whose workers share its device."""
    return _context
