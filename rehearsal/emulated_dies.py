"""Cleanup after emulated dies."""

from pathlib import Path


def remove_emulated_dies(name: str) -> None:
    """Remove the files in /dev/shm that killed processes left behind for the emulated node `name`."""
    for account in Path("/dev/shm").glob(f"npu_emulator-*-{name}"):
        account.unlink(missing_ok=True)
