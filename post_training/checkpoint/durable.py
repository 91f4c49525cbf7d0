"""Files that are either whole or not there: written under another name, synced, renamed; and their SHA-256."""

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PARTIAL_SUFFIX = ".partial"

_READ_BYTES = 4 << 20
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_NO_SYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What fsync(2) of a folder answers where a file system has none; of a file, each of them is an error."""


@dataclass(frozen=True)
class Written:
    """What is known of a file: its size in bytes and the hexadecimal SHA-256 of its content."""

    bytes: int
    sha256: str


def write_durably(
    path: Path, chunks: Iterable[bytes | memoryview], space: int, progress: Callable[[int], None]
) -> Written:
    """Write a file under a temporary name, sync it, and rename it to `path`.

    space: bytes to reserve first, so that a full disk is noticed before any work is done.
    progress: called with the number of bytes after each write.
    Raises OSError (ENOSPC, EFBIG, ...); the temporary file is removed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
    digest, size = hashlib.sha256(), 0
    try:
        with partial.open("wb", buffering=0) as file:
            _reserve(file.fileno(), space)
            for chunk in chunks:
                digest.update(chunk)
                _write_all(file.fileno(), chunk)
                size += len(chunk)
                progress(len(chunk))
            file.truncate(size)
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return Written(size, digest.hexdigest())


def write_text_durably(path: Path, text: str) -> Written:
    """`write_durably` of a text in UTF-8."""
    content = text.encode()
    return write_durably(path, [content], len(content), lambda _: None)


def hash_file(path: Path, progress: Callable[[int], None]) -> Written:
    """Size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
            progress(count)
    return Written(size, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system can: some of FUSE's and some mounts of NFS cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC_OF_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _reserve(descriptor: int, space: int) -> None:
    """fallocate(2) itself: os.posix_fallocate writes every block where the file system cannot reserve.

    A reserved file is also written several times faster on ext4, which then has no blocks left to find.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if space and libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(space)):
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code))
