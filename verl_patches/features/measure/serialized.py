"""Bytes of tensors that this process has serialized: on the driver, what it hands to workers."""

from __future__ import annotations

_bytes = 0


def add(size: int) -> None:
    """Count the bytes of one batch."""
    global _bytes
    _bytes += size


def take() -> int:
    """The bytes since the last call."""
    global _bytes
    taken, _bytes = _bytes, 0
    return taken
