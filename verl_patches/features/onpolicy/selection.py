"""Letting more columns of a batch through a selection that somebody else makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AlsoSelecting:
    """Stands for a verl `DataProto` whose `select` also keeps the `extra` columns that it has."""

    def __init__(self, data: Any, extra: Sequence[str]):
        self._data = data
        self._extra = extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def select(self, batch_keys: Sequence[str]) -> Any:
        """A `DataProto` with `batch_keys` and the extra columns."""
        kept = [name for name in self._extra if name in self._data.batch.keys() and name not in batch_keys]
        return self._data.select(batch_keys=[*batch_keys, *kept])
