"""Finds out whether this machine has a real NPU. Standard library only: the installer runs it before torch is used."""

from pathlib import Path


def find_real_npu(
    device_directory: Path = Path("/dev"), driver_directory: Path = Path("/usr/local/Ascend/driver")
) -> str | None:
    """Return the evidence of a real NPU on this machine, a device file or the driver; None if there is none."""
    dies = sorted(device_directory.glob("davinci[0-9]*"))
    if dies:
        return f"the device file {dies[0]}"
    if driver_directory.exists():
        return f"the driver in {driver_directory}"
    return None


def refuse_real_npu(**places: Path) -> None:
    """Raise RuntimeError if `find_real_npu` finds something: the emulator must not replace a real NPU."""
    found = find_real_npu(**places)
    if found:
        raise RuntimeError(f"npu-emulator does not install or run beside a real NPU; found {found}")
