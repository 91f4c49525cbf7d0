"""What emulated dies leave behind."""

from pathlib import Path


def remove_emulated_dies(name: str) -> None:
    """Removes what processes that were killed have left of the emulated node `name`."""
    for account in Path("/dev/shm").glob(f"npu_emulator-*-{name}"):
        account.unlink(missing_ok=True)
