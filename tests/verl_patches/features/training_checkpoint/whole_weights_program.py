"""Runs on each of two ranks: a tiny Qwen2 is sharded by FSDP and by FSDP2 and saved whole."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_patches.features.training_checkpoint.whole_weights import save_weights


def main(folder: Path) -> int:
    from torch_npu.contrib import transfer_to_npu  # noqa: F401  (FSDP2 of torch 2.5.1 looks for streams in torch.cuda)

    dist.init_process_group("cpu:gloo,npu:hccl")
    rank, model = dist.get_rank(), folder / "model"
    torch.npu.set_device(rank)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name, shard in {"fsdp": sharded, "fsdp2": fully_sharded}.items():
        whole = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
        save_weights(folder / name, shard(whole), tokenizer, torch.bfloat16, rank)
    dist.destroy_process_group()
    return 0


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.npu.current_device(), use_orig_params=False)


def fully_sharded(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed._composable.fsdp import fully_shard

    mesh = dist.init_device_mesh("npu", (dist.get_world_size(),))
    model = model.npu()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
