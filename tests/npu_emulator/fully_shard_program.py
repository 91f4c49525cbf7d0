"""Runs on each of two ranks: training with torch's fully_shard (FSDP2), against the same model whole on the host."""

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch import nn

STEPS = 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3), nn.LayerNorm(3))


def train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.fsdp import fully_shard

    mesh = dist.init_device_mesh("npu", (dist.get_world_size(),))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(folder: Path) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=60))
    batches = [torch.randn(size, 4, 5, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    own = [batch[rank].to("npu") for batch in batches]
    try:
        train(shard(build().to("npu")), own[:1])
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    assert refusal == "FSDP requires CUDA for streams", refusal  # what torch 2.5.1 says for every device but CUDA

    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    plain, shorter, sharded = build(), build(), shard(build().to("npu"))
    train(plain, [batch.flatten(0, 1) for batch in batches])
    train(shorter, [batch.flatten(0, 1) for batch in batches[:-1]])
    train(sharded, own)
    for got, whole, other in zip(sharded.parameters(), plain.parameters(), shorter.parameters(), strict=True):
        assert got.device.type == "npu" and got.placements[0].is_shard()
        torch.testing.assert_close(got.full_tensor().cpu(), whole.detach(), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(got.full_tensor().cpu(), other, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
    return 0
