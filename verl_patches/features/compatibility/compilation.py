"""Running functions that upstream marks for torch.compile as they are written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_compilation() -> Iterator[None]:
    """Make ``torch.compile``, called or used as a decorator, return the function unchanged within this context."""
    import torch

    def unchanged(function: Callable | None = None, **options: Any) -> Callable:
        return (lambda decorated: decorated) if function is None else function

    upstream = torch.compile
    torch.compile = unchanged
    try:
        yield
    finally:
        torch.compile = upstream
