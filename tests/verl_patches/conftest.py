"""A process group of one rank on the device, for code that agrees with other ranks."""

import socket

import pytest


@pytest.fixture(scope="session")
def lone_rank():
    """The default process group over hccl with this process as its only rank."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    torch.npu.set_device(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("hccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
