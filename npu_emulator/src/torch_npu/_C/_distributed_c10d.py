"""The process group backend "hccl"."""

import datetime
import functools
import os

import torch.distributed as dist

from npu_emulator import _C

_DEFAULT_TIMEOUT = datetime.timedelta(seconds=1800)


class _Options:
    """Options of a process group; only the timeout means something here."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = _DEFAULT_TIMEOUT
        self.hccl_config = {}
        self.global_ranks_in_group: list[int] = []
        self.group_id = ""


@functools.cache
def _connections():
    """gloo's connection manager, shared by all groups of the process.

    Emulated dies are on one machine, unless HCCL_SOCKET_IFNAME names the interface on which nodes reach each other.
    """
    return dist.ProcessGroupGloo.create_device(interface=os.environ.get("HCCL_SOCKET_IFNAME", "lo").lstrip("="))


class ProcessGroupHCCL:
    """Makes an hccl backend for one group; what comes back is the backend."""

    Options = _Options

    def __new__(cls, store, rank: int, size: int, options=None):
        carrier = dist.ProcessGroupGloo._Options()
        carrier._devices = [_connections()]
        carrier._threads = 1
        carrier._timeout = getattr(options, "_timeout", None) or _DEFAULT_TIMEOUT
        return _C.HcclBackend(dist.ProcessGroupGloo(store, rank, size, carrier), store, rank, size)


def create_backend(backend_options, options) -> _C.HcclBackend:
    """What torch.distributed calls to make a group of the backend "hccl"."""
    options = options if isinstance(options, _Options) else _Options()
    options._timeout = backend_options.timeout
    return ProcessGroupHCCL(backend_options.store, backend_options.group_rank, backend_options.group_size, options)
