"""Finds out whether this machine has a real NPU. Standard library only: the installer runs it before torch is used."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path


def find_real_npu(
    device_directory: Path = Path("/dev"),
    driver_directory: Path = Path("/usr/local/Ascend/driver"),
    distribution: Callable[[str], object] | None = importlib.metadata.distribution,
) -> str | None:
    """What shows that a real NPU is installed here, or None: its device files, its driver, or Huawei's torch_npu.

    `distribution` is None where torch_npu is part of the emulation and shows nothing.
    """
    dies = sorted(device_directory.glob("davinci[0-9]*"))
    if dies:
        return f"the device file {dies[0]}"
    if driver_directory.exists():
        return f"the driver in {driver_directory}"
    if distribution is None:
        return None
    try:
        distribution("torch-npu")
    except importlib.metadata.PackageNotFoundError:
        return None
    return "the torch-npu package"


def refuse_real_npu(**places) -> None:
    """Raise RuntimeError where `find_real_npu` finds something: an NPU that is there must not be stood in for."""
    found = find_real_npu(**places)
    if found:
        raise RuntimeError(f"npu-emulator does not install or run beside a real NPU; found {found}")
