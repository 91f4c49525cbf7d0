"""Ranks that train with Megatron-core, as `verl_plugin.megatron_core` builds it, and hand their weights over.

`main(folder)` writes each case's results to `megatron.<run>.<rank>.json`, as `fsdp_program` does, for the run named by
`run.txt` in the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from mbridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel

import verl_plugin.megatron_core  # noqa: F401
from post_training.layouts.layout import Shard
from post_training.layouts.model_tensors import train_tensors
from tests.stack_2026.verl_plugin.fsdp_program import TIED, Case, Rank, measured
from verl_plugin.alltoallv.megatron_layout import fitted, megatron_placement

# By name of the run: sizes of Megatron's tensor, pipeline and expert parallelism, and the cases.
CASES: dict[str, tuple[int, int, int, list[Case]]] = {
    "one": (1, 1, 1, [Case("qwen3", 1), Case("qwen3moe", 1), Case("deepseek", 1), Case("qwen2.5", 1)]),
    "experts": (1, 1, 2, [Case("qwen3moe", 2, ep=2), Case("qwen3moe", 1), Case("deepseek", 2, dtype="float32")]),
    "experts over four": (1, 1, 4, [Case("qwen3moe", 2, 2, 4), Case("qwen3moe", 4), Case("deepseek", 2)]),
    "tensors": (2, 1, 1, [Case("qwen3moe", 1, 2, 2), Case("qwen2.5", 2), Case("deepseek", 2), Case(TIED, 1)]),
    "tensors and layers": (2, 2, 1, [Case("qwen3", 4), Case("qwen2.5", 2), Case("deepseek", 1), Case(TIED, 2)]),
}


class MegatronRank(Rank):
    """One case on this rank."""

    def build(self, checkpoint: Path) -> None:
        # Megatron-core keeps the previous model's attention backend in these.
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            os.environ.pop(name, None)
        bridge = AutoBridge.from_pretrained(str(checkpoint), dtype=torch.float32)
        self.models = bridge.get_model(bf16=False, wrap_with_ddp=True, data_parallel_random_init=False)
        bridge.load_weights(self.models, str(checkpoint), memory_efficient=False)
        self.bridge, self.transformer_config = bridge, bridge.config

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return train_tensors(self.models)

    def shards(self) -> list[Shard]:
        tensors = self.tensors()
        placement = megatron_placement(self.transformer_config, tensors)
        return fitted(self.table.megatron(placement, self.rank), tensors, placement, self.rank)

    def unlike_upstream(self) -> list[str]:
        """Return the rollout weights that differ from slices of the weights that mbridge gathers, as upstream does.

        Collective. mbridge exports training's weights bit for bit, without any of this project's code.
        """
        with torch.no_grad():
            self.full = {name: value.cpu().clone() for name, value in self.bridge.export_weights(self.models)}
        return self.differing()

    def parameters(self) -> Iterable[torch.Tensor]:
        return (parameter for model in self.models for parameter in model.parameters())


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    name = (folder / "run.txt").read_text()
    tensor, pipeline, experts, cases = CASES[name]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    found: dict[str, Any] = {}
    for case in cases:
        member = MegatronRank(folder, case)
        found[case.name] = measured(member) | {"upstream": member.unlike_upstream()}
    (folder / f"megatron.{name}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
