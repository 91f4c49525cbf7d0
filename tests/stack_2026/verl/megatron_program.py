"""Megatron-core's models as `verl_plugin.megatron_core` builds them, against transformers and their own checkpoint.

Every rank of a group runs it, experts spread over all of them; the first prints what it found as JSON, by model.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from mbridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel
from transformers import AutoModelForCausalLM

import overlay
import verl_plugin.megatron_core  # noqa: F401

TOKENS = 12


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of a Megatron model for one sequence."""
    length = ids.shape[1]
    positions = torch.arange(length, device="npu")[None]
    hidden = torch.ones(length, length, dtype=torch.bool, device="npu").triu(1)[None, None]
    return model(input_ids=ids.npu(), position_ids=positions, attention_mask=hidden)


def compare(folder: Path) -> dict[str, float]:
    """How far logits and gradients are from those of transformers, and how many exported weights differ."""
    # Megatron-core keeps the choice of the model before.
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    bridge = AutoBridge.from_pretrained(str(folder), dtype=torch.float32)
    models = bridge.get_model(bf16=False, wrap_with_ddp=True, data_parallel_random_init=False)
    bridge.load_weights(models, str(folder), memory_efficient=False)
    ids = torch.randint(9, 500, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    found = logits_of(models[0], ids)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(input_ids=ids).logits
    found.logsumexp(-1).mean().backward()
    expected.logsumexp(-1).mean().backward()
    gradient = models[0].module.embedding.word_embeddings.weight
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    with torch.no_grad():
        exported = {name: weight.cpu() for name, weight in bridge.export_weights(models)}
    assert stored.keys() == exported.keys(), stored.keys() ^ exported.keys()
    own = gradient.main_grad if hasattr(gradient, "main_grad") else gradient.grad
    wanted = reference.model.embed_tokens.weight.grad
    return {
        "logits": (found.cpu() - expected).abs().max().item(),
        "gradient": (own.cpu() - wanted).abs().max().item() / wanted.abs().max().item(),
        "differ": sum(not torch.equal(exported[name].float(), weight.float()) for name, weight in stored.items()),
    }


def main(folders: list[str]) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    results = {Path(folder).name: compare(Path(folder)) for folder in folders}
    if dist.get_rank() == 0:
        print(json.dumps(results | {"executed": overlay.executed(), "problems": overlay.report().problems}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
