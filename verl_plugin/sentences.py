"""Error messages that several parts of the plugin share."""

from __future__ import annotations

from typing import Any


def invalid(key: str, value: Any, reason: str, remedy: str) -> str:
    """Return why a configuration key is rejected and what to do; `remedy` completes "Set it to"."""
    return f"{key}={value} is invalid: {reason}. Set it to {remedy}."
