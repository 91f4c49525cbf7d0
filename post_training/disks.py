"""Find the full disk behind a failed write, so that the error can name it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from post_training.arguments import absolute

FULL = (errno.ENOSPC, errno.EDQUOT)
# A disk with less free space than this counts as full.
_LEAST_BYTES = 1 << 16


def describe_full_disk(paths: Iterable[str | os.PathLike[str]]) -> str | None:
    """Describe the first full disk among those that hold `paths` in one sentence; None if there is none."""
    for path in paths:
        folder = Path(os.path.abspath(path))
        while not folder.exists():
            folder = folder.parent
        status = os.statvfs(folder)
        lacks = []
        if status.f_blocks and status.f_bavail * status.f_frsize < _LEAST_BYTES:
            lacks.append("space")
        if status.f_files and status.f_favail == 0:
            lacks.append("inodes")
        if lacks:
            return (
                f"the disk that holds {path}, mounted at {mount_point(folder)}, is full (no {' and no '.join(lacks)} "
                "left): make room there, or write elsewhere"
            )
    return None


def mount_point(folder: Path) -> Path:
    """Return the mount point of the file system that holds `folder`."""
    folder = absolute(folder)
    while not os.path.ismount(folder):
        folder = folder.parent
    return folder
