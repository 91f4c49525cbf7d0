"""The folder of kernels that torch has compiled on a machine, kept while MindSpeed starts.

MindSpeed's ``delete_lock_file`` removes the whole folder when it is imported and finds a lock in it, and there is one
whenever another process compiles a kernel or loads one: that process then fails, and all kernels are compiled anew.
The ranks of a machine start some seconds apart, so it is seen as soon as the first of them loads a kernel early.

What MindSpeed does it for is a lock that a killed process left, for which everybody waits without end. Those, and
nothing else, are removed here.
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

# The name that torch gives to the lock in the folder of a kernel.
_LOCK = "lock"
# A process has made a lock a moment before it holds it open.
_SURELY_OPEN_S = 60


@contextmanager
def kept_kernels() -> Iterator[None]:
    """Remove abandoned locks; and MindSpeed, imported inside, asks in vain where the folder of all kernels is."""
    upstream = cpp_extension._get_build_directory
    folder = Path(upstream("", False))
    remove_abandoned_locks(folder)

    def of_one_kernel(name: str, verbose: bool) -> str:
        return upstream(name, verbose) if name else str(folder / "no folder of all kernels")

    with mock.patch.object(cpp_extension, "_get_build_directory", of_one_kernel):
        yield


def remove_abandoned_locks(folder: Path) -> list[Path]:
    """Remove, and return, the locks in `folder` that no process of this machine holds.

    Other machines are not asked: the folder (``TORCH_EXTENSIONS_DIR``, or below ``~/.cache``) must be on a local disk.
    """
    locks = [lock.resolve() for lock in folder.glob(f"*/{_LOCK}")]
    if not locks:
        return []
    held, now, abandoned = _open_files(), time.time(), []
    for lock in locks:
        try:
            if str(lock) in held or now - lock.stat().st_mtime < _SURELY_OPEN_S:
                continue
        except FileNotFoundError:  # its process has just ended its work
            continue
        lock.unlink(missing_ok=True)
        logger.warning("removed %s, which a process that is gone has left: every rank would wait for it", lock)
        abandoned.append(lock)
    return abandoned


def _open_files() -> set[str]:
    """What the processes of this machine hold open, as far as this user may see."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(os.readlink(link))
        except OSError:  # ended, or another user's
            continue
    return found
