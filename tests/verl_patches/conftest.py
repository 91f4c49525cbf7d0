"""A process group of one rank on the device, for code that agrees with other ranks."""

import socket

import pytest


@pytest.fixture(scope="session")
def last_group():
    """Ends the process group that is there at the end."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def lone_rank(last_group):
    """The default process group over hccl with this process as its only rank; tests of fake ranks may have ended it."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    if not dist.is_initialized():
        torch.npu.set_device(0)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        dist.init_process_group("hccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    return dist.group.WORLD
