"""Hydra overrides as text. Needs only the standard library."""

from __future__ import annotations

import re
from pathlib import Path

from post_training.arguments import absolute

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*")  # without a slash it could be a number or null
_KEY_OF_A_PATH = re.compile(r"(?:.*[._])?(?:path|dir|files?)")
_ENTRY = re.compile(r"""'([^']*)'|"([^"]*)"|([^\s,'"]+)""")
_NOT_RELATIVE = ("/", "~", "$", "{")  # paths that do not depend on the current folder, and values that are none
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


def with_absolute_path(override: str) -> str:
    """Return an override whose relative path, or list of them, counts from the current folder; others unchanged.

    For processes that start in another folder, where the same path may be another file. Only keys like ``model.path``,
    ``default_local_dir`` and ``train_files`` have paths.
    """
    name, _, value = override.partition("=")
    in_list = value.startswith("[") and value.endswith("]")
    if not _KEY_OF_A_PATH.fullmatch(name.lstrip("+")):
        return override
    entries = ["".join(found) for found in _ENTRY.findall(value[1:-1])] if in_list else [value.strip("'\"")]
    paths = [entry if _is_fixed(entry) else str(absolute(entry)) for entry in entries]
    if paths == entries:
        return override
    return f"{name}=[{','.join(map(quoted, paths))}]" if in_list else f"{name}={quoted(paths[0])}"


def _is_fixed(entry: str) -> bool:
    # A backslash may be one of Hydra's escapes.
    return entry in ("", "null") or entry.startswith(_NOT_RELATIVE) or "://" in entry or "\\" in entry
