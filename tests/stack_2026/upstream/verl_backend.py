"""Give verl's own tests of checkpoint engines the backend `alltoallv` under the name that they hard-code, `nccl`.

VERL_USE_EXTERNAL_MODULES names this module, which lies beside verl's tests. They train with strategy `fsdp`, and their
rollout ranks take whole tensors by name and have no vLLM worker. So this module extends verl's engine of that strategy
as this project extends the one of `fsdp2`; and a rollout rank here serves the whole model in vLLM's layout, and returns
the received weights by HF name.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig
from verl.checkpoint_engine import CheckpointEngineRegistry

from post_training.layouts.layout import PADDING, RolloutPlacement, Shard
from post_training.models.families import table_for
from post_training.reshard.handover import Importer
from verl_plugin.alltoallv.addresses import control_path
from verl_plugin.alltoallv.checkpoint_engine import AlltoallvCheckpointEngine
from verl_plugin.alltoallv.control import Control, Description
from verl_plugin.alltoallv.fsdp2_engine import AlltoallvFSDP2
from verl_plugin.alltoallv.settings import AlltoallvSettings
from verl_plugin.alltoallv.transfer import ray_job
from verl_plugin.engines import extend_engine

MODEL = Path("~/models/Qwen/Qwen3-8B-Base").expanduser()
SPOILED = Path(__file__).with_name("spoiled")
"""If this file exists, a rollout rank spoils a weight, and verl's test must fail."""

extend_engine("fsdp", AlltoallvFSDP2)


class WholeModel:
    """A stand-in for a vLLM worker that serves a whole model."""

    def __init__(self, place: int) -> None:
        self.shards = [*table_for(AutoConfig.from_pretrained(MODEL)).vllm_ascend(RolloutPlacement(1), 0)]
        self.live = {name: torch.empty(shape, dtype=torch.bfloat16, device="npu") for name, shape in self.shapes()}
        weights = {name: (tuple(value.shape), value.dtype) for name, value in self.live.items()}
        description = Description(weights, RolloutPlacement(1), AlltoallvSettings())
        self.control = Control(control_path(ray_job(), place), description)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of each of vLLM's weights. Fused tensors are stacked along the first dimension."""
        rows: dict[str, int] = {}
        widths: dict[str, tuple[int, ...]] = {}
        for shard in self.shards:
            height, *width = shard.extents
            rows[shard.local] = rows.get(shard.local, 0) + height
            widths[shard.local] = tuple(width)
        return [(name, (rows[name], *widths[name])) for name in rows]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return the received weights by HF name."""
        kept: list[Shard] = [shard for shard in self.shards if shard.hf_name != PADDING]
        return [(shard.hf_name, shard.locate(self.live)) for shard in kept]


@CheckpointEngineRegistry.register("nccl")
class NamedTensors(AlltoallvCheckpointEngine):
    """The engine under test; a stand-in unpacks its buckets into the named tensors that the test expects."""

    def __init__(self, bucket_size: int, is_master: bool = False, rebuild_group: bool = False) -> None:
        super().__init__(bucket_size, is_master)
        self.worker: WholeModel | None = None

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        if self.worker is None:
            self.worker = WholeModel(dist.get_rank(self._group) - self._trainers)
        importer: Any = None
        async for name, content in super().receive_weights(global_steps):
            importer = importer or Importer(self.worker.control.manifest, self.worker.live, self.worker.control.version)
            importer.take(name, content)
        importer.finish()
        if SPOILED.exists():
            next(iter(self.worker.live.values()))[0].add_(1.0)
        for each in self.worker.named():
            yield each
