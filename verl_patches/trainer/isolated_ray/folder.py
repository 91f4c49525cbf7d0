"""A run's private folder: no other user can read it, and it does not outlive the run for long.

While the run lives, it holds a lock on a file in the folder. The kernel releases the lock however the run ends, so the
next run recognises what a killed one has left behind, and removes it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = ".run-of-verl-patches"
_SHARED_MEMORY = Path("/dev/shm")
# Ray's sockets lie below the folder, at .../r/session_YYYY-MM-DD_HH-MM-SS_UUUUUU_PID/sockets/plasma_store.
_LONGEST_SOCKET = len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_LONGEST_SOCKET_PATH = 107
_RANDOM = 8


class FolderError(OSError):
    """No private folder can be made; the message is one sentence."""


@contextmanager
def private_folder(
    kind: str, base: str | os.PathLike[str] | None = None, on_removal: Callable[[str], None] = lambda name: None
) -> Iterator[Path]:
    """Make a folder ``KIND-RANDOM`` that only its user can enter; remove it at the end with the run's shared memory.

    Folders that killed runs of the same user left in the same place are removed first.

    Args:
        kind: a short word.
        base: where to make it; by default the folder for temporary files, or /tmp if sockets in it would have longer
            paths than the kernel takes.
        on_removal: called with the name of each folder that is removed.

    Raises:
        FolderError: the folder cannot be made in ``base``.
    """
    parent = Path(base) if base else _default_base(kind)
    _remove_abandoned(kind, parent, on_removal)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=parent))
        mark = os.open(folder / _MARK, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise FolderError(
            f"no private folder can be created in {parent} ({error.strerror}). Set TMPDIR to a writable one"
        ) from error
    try:
        fcntl.flock(mark, fcntl.LOCK_EX)
        # Written under the lock: until then no other run can recognise the folder, and take it for an abandoned one.
        os.write(mark, _MARK.encode())
        yield folder
    finally:
        _remove(folder, on_removal)
        os.close(mark)


def shared_memory_prefix(folder: Path) -> str:
    """Return the prefix of the names of a run's shared memory: `psm_`, and the folder of its temporary files.

    For /tmp/run-abcdefgh that is `psm_tmp-run-abcdefgh_`. scripts/lib/ray_node.sh removes by the same names.
    """
    return f"psm_{str(folder.resolve()).strip('/').replace('/', '-')}_"


def _default_base(kind: str) -> Path:
    base = Path(tempfile.gettempdir())
    path = len(os.fsencode(base)) + 1 + len(kind) + 1 + _RANDOM + _LONGEST_SOCKET
    return base if path <= _LONGEST_SOCKET_PATH else Path("/tmp")


def _remove_abandoned(kind: str, parent: Path, on_removal: Callable[[str], None]) -> None:
    for folder in parent.glob(f"{kind}-{'?' * _RANDOM}"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or status.st_mode != 0o40700:
                continue
            mark = os.open(folder / _MARK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(mark, 64) == _MARK.encode():
                    _remove(folder, on_removal)
            finally:
                os.close(mark)


def _remove(folder: Path, on_removal: Callable[[str], None]) -> None:
    """Remove a folder, the shared memory of its run and of runs inside it, and last the mark that identifies it.

    If something in it cannot be removed, the mark stays, so that a later run tries again.
    """
    for each in (folder, *(mark.parent for mark in folder.glob(f"*/{_MARK}"))):
        for memory in _SHARED_MEMORY.glob(f"{glob.escape(shared_memory_prefix(each))}*"):
            memory.unlink(missing_ok=True)
    on_removal(folder.name)
    with suppress(OSError):  # it may have gone, as a machine's own cleaning removes old folders from /tmp
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _MARK:
                entry.unlink(missing_ok=True)
        if [entry.name for entry in folder.iterdir()] in ([_MARK], []):
            shutil.rmtree(folder)
