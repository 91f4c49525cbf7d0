"""Counter of tensor bytes that this process has serialized: on the driver, those that it sends to workers."""

from __future__ import annotations

from dataclasses import dataclass

from post_training.process_context import process_context


@dataclass
class _Serialized:
    size: int = 0


def add(size: int) -> None:
    """Count the bytes of one batch."""
    process_context().of(_Serialized).size += size


def take() -> int:
    """Return the bytes since the last call."""
    return process_context().take(_Serialized).size
