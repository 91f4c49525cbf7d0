"""Lets one process at a time make a folder, while others wait.

filelock leaves its file behind on Unix; here the last owner removes it, and another user of a checkout can wait too.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_at_a_time(output: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Be the only process that makes `output`; call `on_wait` before waiting for another one.

    The lock is a file beside `output`, which is removed at the end. A killed process leaves the file, unlocked.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = output.with_name(f".{output.name}.lock")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        yield  # nothing can be made there, but what is there can be kept
        return
    while True:
        # For reading: another user, who may share this checkout, cannot write it.
        with os.fdopen(os.open(lock, os.O_RDONLY | os.O_CREAT, 0o644)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_there(file.fileno(), lock):
                continue  # the previous owner has removed this file
            try:
                yield
            finally:
                lock.unlink()
            return


def _is_there(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
