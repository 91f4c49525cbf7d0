"""acl.rt: functions return their result and an error code, or the code alone."""

import ctypes
import os


def get_device_count() -> tuple[int, int]:
    """Dies visible to this process. Counted without torch: Ray asks in processes that have not imported it."""
    machine = int(os.environ.get("NPU_EMULATOR_DEVICES") or 8)
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is None:
        return machine, 0
    count = 0
    for entry in visible.split(","):
        if not entry.strip().isdigit() or int(entry) >= machine:
            break
        count += 1
    return count, 0


def set_device(device: int) -> int:
    import torch

    if not 0 <= device < torch.npu.device_count():
        return 107001  # ACL_ERROR_RT_INVALID_DEVICEID
    torch.npu.set_device(device)
    return 0


def reset_device(device: int) -> int:
    """Nothing is held for a device but tensors, which stay."""
    return 0


def get_mem_info(attribute: int) -> tuple[int, int, int]:
    """Free and total bytes of the current device; there is one kind of memory, whichever the attribute names."""
    import torch

    return *torch.npu.mem_get_info(), 0


def memcpy(destination: int, destination_size: int, source: int, size: int, kind: int) -> int:
    """Copy bytes between addresses, which are all in host memory."""
    if size > destination_size:
        return 107002  # ACL_ERROR_RT_PARAM_INVALID
    ctypes.memmove(destination, source, size)
    return 0
