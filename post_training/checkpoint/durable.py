"""Writes files atomically: under a temporary name, synced, then renamed; and computes their SHA-256."""

import ctypes
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PARTIAL_SUFFIX = ".partial"

PART_BYTES = 64 << 20
"""Upper bound of the bytes written between two calls of `progress`."""

_READ_BYTES = 4 << 20
# The disk may be behind by at most two such windows.
_WINDOW_BYTES = 256 << 20
_BEGIN_WRITING, _WAIT_FOR_WRITING = 2, 7  # flags of sync_file_range(2)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)
_NO_SYNC_OF_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of fsync(2) on a folder if the file system does not support it; on a file each of them is a real error."""


@dataclass(frozen=True)
class Written:
    """A written file: its size in bytes and the hexadecimal SHA-256 of its content."""

    bytes: int
    sha256: str


def write_durably(
    path: Path, chunks: Iterable[bytes | memoryview], space: int, progress: Callable[[int], None]
) -> Written:
    """Write a file under a temporary name, sync it, and rename it to `path`.

    The disk is at most 512 MiB behind the writes. Otherwise most of a large file would be in the page cache when the
    last write returns, and the final sync, which reports no progress, would take most of the time.

    Args:
        path: of the file.
        chunks: the file's content.
        space: bytes to reserve first, so that a full disk is noticed before any work is done.
        progress: called with the number of bytes after each write of at most PART_BYTES.

    Raises:
        OSError: ENOSPC, EFBIG, ...; the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
    digest, size, begun = hashlib.sha256(), 0, 0
    try:
        with partial.open("wb", buffering=0) as file:
            _reserve(file.fileno(), space)
            for part in _parts(chunks):
                digest.update(part)
                _write_all(file.fileno(), part)
                size += len(part)
                if size - begun >= _WINDOW_BYTES:
                    _let_disk_follow(file.fileno(), begun, size)
                    begun = size
                progress(len(part))
            file.truncate(size)
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return Written(size, digest.hexdigest())


def write_text_durably(path: Path, text: str) -> Written:
    """Write a text in UTF-8 with `write_durably`."""
    content = text.encode()
    return write_durably(path, [content], len(content), lambda _: None)


def hash_file(path: Path, progress: Callable[[int], None]) -> Written:
    """Return size and SHA-256 of a file; `progress` is called with the number of bytes after each read."""
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
            progress(count)
    return Written(size, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable if its file system can: some FUSE file systems and NFS mounts cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC_OF_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def _parts(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Divide the chunks into parts of at most PART_BYTES."""
    for chunk in chunks:
        view = memoryview(chunk)
        yield from (view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES))


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _let_disk_follow(descriptor: int, begun: int, size: int) -> None:
    """Start writing the bytes from `begun` to `size` to the disk, and wait for those before them.

    Errors are left to the final sync: this call makes nothing durable, and some file systems do not support it.
    """
    libc = ctypes.CDLL(None)
    libc.sync_file_range(descriptor, ctypes.c_int64(begun), ctypes.c_int64(size - begun), _BEGIN_WRITING)
    if begun:
        libc.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(begun), _WAIT_FOR_WRITING)


def _reserve(descriptor: int, space: int) -> None:
    """Reserve space with fallocate(2): os.posix_fallocate would write every block if the file system cannot reserve.

    A reserved file is also written several times faster on ext4, which then has no more blocks to find.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if space and libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(space)):
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code))
