"""A full disk is named with the place where it is mounted."""

import subprocess
import tempfile
from pathlib import Path

import pytest

from post_training.disks import describe_full_disk


@pytest.fixture
def small_disk():
    """A file system of 128 KiB and 20 inodes, which only root can make."""
    with tempfile.TemporaryDirectory() as folder:
        options = "size=128k,nr_inodes=20"
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"NOT RUN: mounting needs privileges that are not here: {made.stderr.strip()}")
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)


def test_a_disk_with_room_is_not_full(small_disk, tmp_path):
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
