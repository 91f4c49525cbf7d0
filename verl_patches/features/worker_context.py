"""What the workers of a process keep between two calls of verl, which has no argument for it."""

from __future__ import annotations

from typing import Any, TypeVar

Part = TypeVar("Part")


class WorkerContext:
    """One object of every kind that is asked for; a kind is a class that is made without arguments."""

    def __init__(self) -> None:
        self._parts: dict[type, Any] = {}

    def of(self, kind: type[Part]) -> Part:
        """The object of this kind, made when it is asked for first."""
        found = self._parts.get(kind)
        return self._parts.setdefault(kind, kind()) if found is None else found


_context = WorkerContext()


def worker_context() -> WorkerContext:
    """That of this process, whose workers share its device."""
    return _context
