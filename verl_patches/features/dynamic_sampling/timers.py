"""verl's timers of a step, which begin when its answers are there already."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager

STEP = "step"


@contextmanager
def with_seconds_before(
    timer: AbstractContextManager[None], timing: MutableMapping[str, float], name: str, seconds: dict[str, float]
) -> Iterator[None]:
    """verl's `timer` of `name`, which writes to `timing`; `seconds` by name went by before the step began."""
    with timer:
        yield
    timing[name] += sum(seconds.values()) if name == STEP else seconds.get(name, 0.0)
