"""Code written for CUDA runs on the NPU after transfer_to_npu. It changes its process, so it runs in another one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = {
    "factories": "[torch.zeros(2, device='cuda'), torch.tensor([1], device='cuda:0'), torch.arange(3, device='cuda')]",
    "factory with an object": "[torch.empty(2, device=torch.device('cuda', 0)), torch.rand(2, device=0)]",
    "like and new": "[torch.zeros_like(torch.ones(2), device='cuda'), torch.ones(1).new_zeros(2, device='cuda')]",
    "context": "[in_context()]",
    "tensor methods": "[torch.ones(2).cuda(), torch.ones(2).to('cuda'), torch.ones(2).to(device='cuda:0')]",
    "tensor method with an index": "[torch.ones(2).cuda(0), torch.ones(2).to(torch.cuda.current_device())]",
    "modules": "[torch.nn.Linear(2, 2).cuda().weight, torch.nn.Linear(2, 2).to('cuda').weight]",
    "modules made there": "[torch.nn.Linear(2, 2, device='cuda').weight]",
    "meta modules": "[torch.nn.Linear(2, 2, device='meta').to_empty(device='cuda').weight]",
    "generators": "[torch.rand(2, generator=torch.Generator('cuda'), device='cuda')]",
    "load": "[torch.load(saved(), map_location='cuda:0', weights_only=True)]",
    "load with a table": "[torch.load(saved('cuda:1'), map_location={'cuda:1': 'cuda:0'}, weights_only=True)]",
    "types": "[torch.cuda.FloatTensor([1.0])]",
}
FACTS = {
    "is available": "torch.cuda.is_available() and torch.cuda.device_count() == torch.npu.device_count()",
    "is_cuda": "torch.ones(1).cuda().is_cuda and not torch.ones(1).is_cuda",
    "device keeps its type": "torch.device is native_device and torch.device('cuda', 1).type == 'cuda'",
    "generator keeps its type": "isinstance(torch.Generator('cuda'), torch.Generator)",
    "generators are of the device": "torch.Generator('cuda').device.type == 'npu'",
    "autocast": "in_autocast() == torch.bfloat16",
    "memory": "torch.cuda.memory_allocated() == torch.npu.memory.memory_allocated() >= 0",
    "streams": "isinstance(torch.cuda.current_stream(), torch.npu.Stream) and torch.cuda.Event().query()",
    "seeds": "seeded() == seeded()",
    "process groups": "dist.get_backend() == 'hccl' and dist.is_nccl_available()",
    "new groups": "dist.get_backend(dist.new_group(backend='nccl')) == 'hccl'",
    "mixed backends": "dist.get_backend(dist.new_group(backend='cpu:gloo,cuda:nccl')) is not None",
    "meshes": "device_mesh.init_device_mesh('cuda', (1, 1), mesh_dim_names=('a', 'b')).device_type == 'npu'",
    "collectives": "reduced() == 3",
    "host stays the host": "torch.zeros(1).device.type == 'cpu' and torch.zeros(1, device='cpu').device.type == 'cpu'",
    "scripts are left alone": "torch.jit.script(saved) is saved and torch.jit.script_method(saved) is saved",
    "names of CUDA alone stay": "hasattr(torch.cuda, 'nvtx')",
}
PROGRAM = """
import io, json, os, sys, tempfile
import torch, torch.distributed as dist
from torch.distributed import device_mesh
native_device = torch.device
from torch_npu.contrib import transfer_to_npu

dist.init_process_group(backend="nccl", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
def in_context():
    with torch.device("cuda"):
        return torch.zeros(1)
def in_autocast():
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        return torch.mm(torch.ones(2, 2).cuda(), torch.ones(2, 2).cuda()).dtype
def saved(place="cpu"):
    file = io.BytesIO()
    torch.save(torch.ones(2, device=place), file)
    file.seek(0)
    return file
def seeded():
    torch.cuda.manual_seed(3)
    return torch.rand(1, device="cuda").item()
def reduced():
    tensor = torch.full((1,), 3.0).cuda()
    dist.all_reduce(tensor)
    return tensor.item()
def attempt(expression):
    try:
        return expression()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
checks, facts = json.loads(sys.argv[1])
names = globals()
found = {name: attempt(lambda: all(t.device.type == "npu" for t in eval(code, names))) for name, code in checks.items()}
found |= {name: attempt(lambda: bool(eval(code, names))) for name, code in facts.items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([CHECKS, FACTS])], capture_output=True, text=True, cwd=Path("/tmp")
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*CHECKS, *FACTS])
def test_after_the_transfer(found, name):
    assert found[name] is True


def test_without_the_transfer_there_is_no_cuda():
    import torch

    assert not torch.cuda.is_available()
