"""A full disk is reported with its mount point."""

import errno
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from post_training.disks import FULL, describe_full_disk


@pytest.fixture
def small_disk():
    """File system of 128 KiB and 20 inodes, which only root can create."""
    with tempfile.TemporaryDirectory() as folder:
        options = "size=128k,nr_inodes=20"
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"NOT RUN: mounting needs privileges that are not here: {made.stderr.strip()}")
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)


def test_disk_with_space_is_not_full(small_disk, tmp_path):
    assert describe_full_disk([small_disk / "not" / "made", tmp_path]) is None


def test_a_disk_without_space_is_named(small_disk, tmp_path):
    (small_disk / "filler").write_bytes(bytes(100 << 10))
    said = describe_full_disk([tmp_path, small_disk / "run" / "data"])
    assert said.startswith(
        f"the disk that holds {small_disk}/run/data, mounted at {small_disk}, is full (no space left)"
    )
    (small_disk / "filler").unlink()
    assert describe_full_disk([small_disk]) is None


def test_a_disk_without_inodes_is_named(small_disk):
    for number in range(20):
        try:
            (small_disk / str(number)).touch()
        except OSError:
            break
    assert "is full (no inodes left)" in describe_full_disk([small_disk])


ROOM = {"f_blocks": 1000, "f_bavail": 500, "f_bfree": 600, "f_frsize": 4096, "f_bsize": 1 << 20, "f_files": 9,
        "f_favail": 5, "f_ffree": 7}  # fmt: skip


@pytest.mark.parametrize(
    "changed, lacks",
    [
        ({}, None),
        ({"f_bavail": 16}, None),
        ({"f_bavail": 15}, "no space"),  # blocks reserved for root do not count, and f_bsize is not the unit
        ({"f_favail": 0}, "no inodes"),
        ({"f_bavail": 0, "f_favail": 0}, "no space and no inodes"),
        ({"f_files": 0, "f_favail": 0}, None),  # btrfs has no inode count
        ({"f_blocks": 0, "f_bavail": 0}, None),  # a network file system that reports nothing
    ],
)
def test_what_is_left_for_a_user_counts(monkeypatch, tmp_path, changed, lacks):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(**ROOM | changed))
    said = describe_full_disk([tmp_path])
    assert said is None if lacks is None else f"is full ({lacks} left)" in said


def test_a_quota_is_a_full_disk():
    """An NFS home whose quota is used up still has free space according to `df`."""
    assert set(FULL) == {errno.ENOSPC, errno.EDQUOT}
