"""Keeps the folder of torch's compiled kernels while MindSpeed starts.

On import, MindSpeed's ``delete_lock_file`` removes the whole folder if there is a lock in it. There is one whenever
another process compiles or loads a kernel: that process then fails, and all kernels are compiled anew. The ranks of a
machine start some seconds apart, so this happens as soon as the first of them loads a kernel early.

MindSpeed does so because of locks that killed processes leave, which every other process waits for without end. Here
only such locks are removed.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from torch.utils import cpp_extension

logger = logging.getLogger(__name__)

# torch's name for the lock in a kernel's folder.
_LOCK = "lock"
# A process creates a lock a moment before it holds it open, so younger locks are left alone.
_SURELY_OPEN_S = 60


@contextmanager
def kept_kernels() -> Iterator[None]:
    """Remove abandoned locks, and hide the folder of all kernels from MindSpeed, which is imported in this context."""
    upstream = cpp_extension._get_build_directory
    folder = Path(upstream("", False))
    remove_abandoned_locks(folder)

    def of_one_kernel(name: str, verbose: bool) -> str:
        return upstream(name, verbose) if name else str(folder / "no folder of all kernels")

    with mock.patch.object(cpp_extension, "_get_build_directory", of_one_kernel):
        yield


def remove_abandoned_locks(folder: Path) -> list[Path]:
    """Remove, and return, the locks in `folder` that no process of this machine holds.

    Processes of other machines are not seen: the folder (``TORCH_EXTENSIONS_DIR``, or below ``~/.cache``) must be on a
    local disk.
    """
    locks = [lock.resolve() for lock in folder.glob(f"*/{_LOCK}")]
    if not locks:
        return []
    held, now, abandoned = _open_files(), time.time(), []
    for lock in locks:
        try:
            if str(lock) in held or now - lock.stat().st_mtime < _SURELY_OPEN_S:
                continue
        except FileNotFoundError:  # its process has just finished
            continue
        lock.unlink(missing_ok=True)
        logger.warning("removed %s, left by a process that has ended: every rank would wait for it", lock)
        abandoned.append(lock)
    return abandoned


def _open_files() -> set[str]:
    """Return the files that processes of this machine hold open, as far as this user may see."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(os.readlink(link))
        except OSError:  # ended, or another user's
            continue
    return found
