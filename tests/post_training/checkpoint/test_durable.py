"""A file gets its name once its content is on disk, and the name is on disk before the writer continues."""

import ctypes
import errno
import os
import re
from pathlib import Path

import pytest

from post_training.checkpoint import durable
from post_training.checkpoint.durable import hash_file, sync_folder, write_durably

CONTENT = [b"one", b"two" * 1000, b""]
SIZE = sum(map(len, CONTENT))


@pytest.fixture
def events(monkeypatch):
    """The syncs, each with its path and size, and the renames, in order."""
    seen = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append(("sync", path, None if path.is_dir() else path.stat().st_size))
        fsync(descriptor)

    def renamed(path, target):
        seen.append(("rename", path, target))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    return seen


def test_content_is_synced_before_the_name_and_the_name_before_the_end(events, tmp_path):
    path, partial = tmp_path / "new" / "file", tmp_path / "new" / ".file.partial"
    written = write_durably(path, iter(CONTENT), 1 << 20, lambda _: None)
    assert events == [("sync", partial, SIZE), ("rename", partial, path), ("sync", path.parent, None)]
    assert written == hash_file(path, lambda _: None) and written.bytes == SIZE


def test_a_failed_sync_leaves_the_old_file_and_nothing_else(monkeypatch, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        write_durably(path, iter(CONTENT), 0, lambda _: None)
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_the_system_takes_in_parts_is_written_whole(monkeypatch, tmp_path):
    path, write = tmp_path / "file", os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:100]))
    written = write_durably(path, iter(CONTENT), 0, lambda _: None)
    assert path.read_bytes() == b"".join(CONTENT) and written == hash_file(path, lambda _: None)


class Windows:
    """A stand-in for the C library, which records calls of sync_file_range as (start, size, flags)."""

    def __init__(self):
        self.asked = []

    def sync_file_range(self, descriptor, start, size, flags):
        self.asked.append((start.value, size.value, flags))


def test_a_large_chunk_is_reported_in_parts_as_the_disk_follows(monkeypatch, tmp_path):
    """A tensor on the host is one chunk, and the page cache takes all of it long before it is on disk."""
    windows, reported, path = Windows(), [], tmp_path / "file"
    monkeypatch.setattr(durable, "PART_BYTES", 10)
    monkeypatch.setattr(durable, "_WINDOW_BYTES", 25)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: windows)
    chunks = [memoryview(bytes(range(64))), b"end"]
    written = write_durably(path, iter(chunks), 0, reported.append)
    assert reported == [10, 10, 10, 10, 10, 10, 4, 3]
    assert windows.asked == [(0, 30, 2), (30, 30, 2), (0, 30, 7)]
    assert path.read_bytes() == bytes(range(64)) + b"end" and written == hash_file(path, lambda _: None)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_a_file_of_several_windows_is_whole(monkeypatch, tmp_path, size):
    """Use the system's own call."""
    monkeypatch.setattr(durable, "PART_BYTES", 32)
    monkeypatch.setattr(durable, "_WINDOW_BYTES", 100)
    content = os.urandom(size)
    written = write_durably(tmp_path / "file", [content], size, lambda _: None)
    assert (tmp_path / "file").read_bytes() == content and written == hash_file(tmp_path / "file", lambda _: None)


@pytest.mark.parametrize(
    ("code", "written"), [(errno.ENOSPC, False), (errno.EIO, False), (errno.EOPNOTSUPP, True), (errno.ENOSYS, True)]
)
def test_space_that_cannot_be_reserved_is_an_error_but_where_nothing_can_be(monkeypatch, tmp_path, code, written):
    class Library:
        def fallocate(self, *_):
            ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library())
    path = tmp_path / "file"
    if written:
        write_durably(path, iter(CONTENT), 1 << 20, lambda _: None)
        assert path.stat().st_size == SIZE
    else:
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            write_durably(path, iter(CONTENT), 1 << 20, lambda _: None)
        assert list(tmp_path.iterdir()) == []


def rejecting_fsync(monkeypatch, of_folders: bool, code: int) -> None:
    """Make fsync(2) fail with `code` as on a file system that cannot sync folders, or files."""
    fsync = os.fsync

    def answered(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir() is of_folders:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", answered)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_folder_that_cannot_be_synced_is_tolerated(tmp_path, monkeypatch, code):
    """FUSE file systems return EINVAL from fsync(2) on a folder."""
    rejecting_fsync(monkeypatch, True, code)
    written = write_durably(tmp_path / "file", iter(CONTENT), SIZE, lambda _: None)
    assert written.bytes == SIZE == (tmp_path / "file").stat().st_size


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_folder_whose_sync_fails_is_an_error(tmp_path, monkeypatch, code):
    rejecting_fsync(monkeypatch, True, code)
    with pytest.raises(OSError) as raised:
        sync_folder(tmp_path)
    assert raised.value.errno == code


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_file_that_cannot_be_synced_is_an_error(tmp_path, monkeypatch, code):
    rejecting_fsync(monkeypatch, False, code)
    with pytest.raises(OSError):
        write_durably(tmp_path / "file", iter(CONTENT), SIZE, lambda _: None)
    assert not list(tmp_path.iterdir())
