"""The runtime's functions: each returns its result and CANN's code, or the code alone; 0 is success."""

import ctypes
import os
import re

from npu_emulator.cann import library


def get_device_count() -> tuple[int, int]:
    """Count the dies visible to this process, without the libraries: Ray asks in processes that do not import torch."""
    machine = int(os.environ.get("NPU_EMULATOR_DEVICES") or 8)
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is None:
        return machine, 0
    dies: list[int] = []
    for entry in re.sub("[^0-9,].*", "", visible, flags=re.S).split(","):
        if not entry or int(entry) >= machine:
            break
        if dies and int(entry) <= dies[-1]:
            return 0, 0
        dies.append(int(entry))
    return len(dies), 0


def memcpy(to: int, room: int, source: int, count: int, kind: int) -> int:
    """Copy `count` bytes between addresses of the host or a device; more than `room` are rejected."""
    return library().aclrtMemcpy(
        ctypes.c_void_p(to), ctypes.c_size_t(room), ctypes.c_void_p(source), ctypes.c_size_t(count), kind
    )


def get_mem_info(attribute: int) -> tuple[int, int, int]:
    """Return free and total bytes of the thread's device, and CANN's code; `attribute` names the kind of memory."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    code = library().aclrtGetMemInfo(attribute, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value, code
