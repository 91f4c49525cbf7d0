"""Writes JSON files of a run, which other programs may read at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def replace_object(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file with one JSON object, replacing an earlier one atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(file)


def append_object(file: Path, entry: Mapping[str, Any]) -> None:
    """Append a line with one JSON object."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # A single write of a whole line in append mode: lines of several processes on a node do not mix.
    line = (json.dumps(entry, allow_nan=False) + "\n").encode()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        # A killed process or a full disk may have left half a line; this entry must begin on a new one.
        size = os.fstat(descriptor).st_size
        whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        os.write(descriptor, line if whole else b"\n" + line)
    finally:
        os.close(descriptor)
