"""Whether the processes of a die can share device memory, asked of the machine once.

verl's sender and receiver of weights both ask when an update ends, and verl 0.9.1 starts `npu-smi` for each answer
(docs/upstream/verl-ipc-support.md).
"""

from __future__ import annotations

from functools import cache

from verl.plugin.platform import get_platform


def remember_ipc_support() -> None:
    """Have verl's platform of this process keep its first answer. An error is none: it is asked again."""
    # verl's set_platform() would warn, in each process, that it replaces a platform that others have already used.
    platform = get_platform()
    if "is_ipc_supported" not in vars(platform):
        vars(platform)["is_ipc_supported"] = cache(platform.is_ipc_supported)
