"""Finds out whether this machine has a real NPU. Standard library only: the installer runs it before torch is used."""

from pathlib import Path


def find_real_npu(
    device_directory: Path = Path("/dev"), driver_directory: Path = Path("/usr/local/Ascend/driver")
) -> str | None:
    """What shows that a real NPU is installed here, or None: its device files, or its driver."""
    dies = sorted(device_directory.glob("davinci[0-9]*"))
    if dies:
        return f"the device file {dies[0]}"
    if driver_directory.exists():
        return f"the driver in {driver_directory}"
    return None


def refuse_real_npu(**places: Path) -> None:
    """Raise RuntimeError where `find_real_npu` finds something: an NPU that is there must not be stood in for."""
    found = find_real_npu(**places)
    if found:
        raise RuntimeError(f"npu-emulator does not install or run beside a real NPU; found {found}")
