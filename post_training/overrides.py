"""Hydra overrides as text. Needs only the standard library."""

from __future__ import annotations

import re
from pathlib import Path

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*")  # without a slash it could be a number or null
_BACKSLASHES_BEFORE_A_QUOTE = re.compile(r"(\\*)('|$)")


def setting(key: str, value: str | int | Path | list[Path]) -> str:
    """Return Hydra's ``key=value``; a path is quoted if Hydra would not take it literally."""
    if isinstance(value, list):
        return f"{key}=[{','.join(quoted(str(entry)) for entry in value)}]"
    return f"{key}={quoted(str(value)) if isinstance(value, Path) else value}"


def quoted(path: str) -> str:
    r"""Return a path in the form that Hydra's grammar takes literally.

    Hydra gives meaning to ``=``, ``{``, ``,``, spaces and much else outside quotes, and rejects letters beyond ASCII
    there. Inside single quotes ``\'`` is a quote, and only the backslashes before a quote are escapes themselves:
    ``a\b`` is written ``'a\b'``, ``it's`` is written ``'it\'s'``, and ``a\`` is written ``'a\\'``.
    """
    if _PLAIN_PATH.fullmatch(path):
        return path
    return "'" + _BACKSLASHES_BEFORE_A_QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), path) + "'"
