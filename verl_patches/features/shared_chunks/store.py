"""Replaces arguments that several workers of a call share by a reference to one stored copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def stored_once(
    positional: Sequence[Any],
    named: Mapping[str, Any],
    workers: int,
    is_chunk: Callable[[Any], bool],
    put: Callable[[Any], Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of verl's call of all workers, with `put(chunk)` for every chunk that several workers take.

    verl distributes arguments only if each is a list with an element for every worker; others are left as they are.
    Four workers of two data-parallel ranks have the list [a, a, b, b], and get [put(a), put(a), put(b), put(b)] from
    two calls of `put`. A chunk for a single worker is passed on as it is.
    """
    every = [*positional, *named.values()]
    if not all(isinstance(argument, list) and len(argument) == workers for argument in every):
        return list(positional), dict(named)
    takers = Counter(id(element) for argument in every for element in argument)
    stored: dict[int, Any] = {}

    def place(element: Any) -> Any:
        if takers[id(element)] == 1 or not is_chunk(element):
            return element
        if id(element) not in stored:
            stored[id(element)] = put(element)
        return stored[id(element)]

    dealt = [[place(element) for element in argument] for argument in every]
    return dealt[: len(positional)], dict(zip(named, dealt[len(positional) :], strict=True))
