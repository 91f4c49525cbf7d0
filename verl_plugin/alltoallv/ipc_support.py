"""Asks the machine only once whether the processes of a die can share device memory.

verl's sender and receiver of weights both ask when an update ends, and verl 0.9.1 starts `npu-smi` for each answer
(docs/upstream/verl-ipc-support.md).
"""

from __future__ import annotations

from functools import cache

from verl.plugin.platform import get_platform


def remember_ipc_support() -> None:
    """Let verl's platform object of this process keep its first answer. After an error it asks again."""
    # verl's set_platform() would warn, in each process, that it replaces a platform that others have already used.
    platform = get_platform()
    if "is_ipc_supported" not in vars(platform):
        vars(platform)["is_ipc_supported"] = cache(platform.is_ipc_supported)
