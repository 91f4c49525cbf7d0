"""Adjusts verl's list of the columns that an update reads from a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UpdateColumns:
    """Wraps a verl `DataProto`; its `select` also keeps those of the columns `extra` that exist, and does not fail on
    those in `absent` that do not."""

    def __init__(self, data: Any, extra: Sequence[str], absent: Sequence[str] = ()):
        self._data, self._extra, self._absent = data, extra, absent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def select(self, batch_keys: Sequence[str]) -> Any:
        """Return a `DataProto` with these columns."""
        there = self._data.batch.keys()
        asked = [name for name in batch_keys if name in there or name not in self._absent]
        return self._data.select(batch_keys=[*asked, *(e for e in self._extra if e in there and e not in asked)])
