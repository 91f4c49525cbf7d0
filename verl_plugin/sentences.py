"""Sentences of errors that more than one part of the plugin says."""

from __future__ import annotations

from typing import Any


def invalid(key: str, value: Any, reason: str, remedy: str) -> str:
    """Why a configuration key is rejected, and what to do: `remedy` completes "Set it to"."""
    return f"{key}={value} is invalid: {reason}. Set it to {remedy}."
