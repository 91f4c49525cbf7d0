"""The sentences that reject a model's config.json, the same for all checks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_SHOWN_CHARACTERS = 80


def invalid(key: str, value: Any, reason: str, remedy: str) -> str:
    """Return `KEY=VALUE of the model's config.json is invalid: REASON. REMEDY.` with the value as shortened JSON."""
    text = json.dumps(value, default=repr)
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return f"{key}={shown} of the model's config.json is invalid: {reason}. {remedy}."


def reject(sentences: Iterable[str]) -> None:
    """Raise ValueError with the first sentence, if there is one."""
    for sentence in sentences:
        raise ValueError(sentence)
