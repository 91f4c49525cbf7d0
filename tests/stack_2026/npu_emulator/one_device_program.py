"""Run two ranks of one communicator on the devices named by the arguments, and print each rank's result."""

import os
import sys

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

rank, port, device = map(int, sys.argv[1:])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
torch.npu.set_device(device)
dist.init_process_group("hccl", rank=rank, world_size=2)
given = torch.full((4,), rank + 1.0).npu()
try:
    dist.all_reduce(given)
    torch.npu.synchronize()
    print("sum", given.tolist())
except RuntimeError as error:
    print("rejected", " ".join(str(error).split()))
os._exit(0)
