"""The groups of ranks that kernels with a collective inside name by a string."""

import functools
import os
import socket

import torch
import torch.distributed as dist


def find_group(name: str, rank: int = 0) -> dist.ProcessGroup:
    """The group of this process whose communicator of HCCL has this name. RuntimeError if there is none."""
    device = torch.device("npu")
    for group in dist.distributed_c10d._world.pg_map:
        backend = group._get_backend(device) if device in group._device_types else None
        # A group of gloo alone serves tensors of every device, through the host, and has no communicator.
        if hasattr(backend, "get_hccl_comm_name") and backend.get_hccl_comm_name(rank) == name:
            return group
    raise RuntimeError(f"there is no communicator {name!r} in this process")


def meet_in_domain(domain: str, rank: int, size: int) -> dist.ProcessGroup:
    """The group of the `size` processes of this node that name the same domain, as LCAL, ATB's own library, finds it.

    `rank` is the number of this process among them, in the order of their ranks.
    """
    return _met(dist.distributed_c10d._get_default_store(), domain, rank, size)


@functools.cache
def _met(store: dist.Store, domain: str, rank: int, size: int) -> dist.ProcessGroup:
    place = f"lcal/{socket.gethostname()}/{os.environ.get('NPU_EMULATOR_NODE', 'default')}/{domain}/{size}"
    store.set(f"{place}/{rank}", str(dist.get_rank()))
    members = [int(store.get(f"{place}/{other}")) for other in range(size)]
    if members != sorted(members):
        raise NotImplementedError(f"the domain {domain!r} numbers the ranks {members}: other orders are not emulated")
    return dist.new_group(members, backend="hccl", use_local_synchronization=True)
