"""Ranks that train with FSDP2 and hand their weights over, each to a stand-in for its die's worker in the same process.

`main(folder)` writes each case's results to `<world>.<rank>.json`: the rollout weights that differ from those that a
naive reference slices from transformers' own files, and the bytes and memory of the update.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from post_training.layouts.fsdp_shards import fsdp_shards, local_tensors
from post_training.layouts.grouped_query import GroupedQueryShape
from post_training.layouts.layout import RolloutPlacement, Shard
from post_training.layouts.regions import SideRegions, regions_of
from post_training.models.deepseek_v3 import DeepseekV3Shape
from post_training.models.families import table_for
from post_training.reshard import handover
from post_training.reshard.handover import Exporter, HandoverError, Importer, Manifest, without_memory
from tests.post_training.layouts import grouped_query_reference, reference
from tests.stack_2026.vllm_ascend.models import MODELS, write_checkpoint
from tests.vllm_cases import write_random_model

BUCKET = 200_000
GREW = 1.25
BIAS = "e_score_correction_bias"
TIED = "tied"
"""Qwen2.5 with tied embeddings, as in the smaller published models."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the placement and dtype of one rollout instance, and the number of ranks that have each shard."""

    model: str
    tp: int
    dp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"
    copies: int = 1

    @property
    def name(self) -> str:
        return " ".join(map(str, dataclasses.astuple(self)))


CASES = {
    1: [Case("qwen3", 1, dtype="float32"), Case("deepseek", 1)],
    2: [
        Case("qwen3", 1),
        Case("qwen3", 2, dtype="float32"),
        Case("qwen3moe", 2, ep=2),
        Case("deepseek", 2),
        Case("qwen2.5", 2),
        Case(TIED, 2),
    ],
    4: [
        Case("qwen3", 2, copies=2),
        Case("qwen3", 4),
        Case("qwen3moe", 2, 2, 4),
        Case("qwen3moe", 1, 2),
        Case("deepseek", 2, 2, 4, dtype="float32"),
    ],
}


class Rank:
    """One case on this rank."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.case, self.rank, self.world = case, dist.get_rank(), dist.get_world_size()
        self.config = AutoConfig.from_pretrained(folder / case.model)
        self.full = safetensors.torch.load_file(folder / case.model / "model.safetensors")
        self.table = table_for(self.config)
        self.build(folder / case.model)
        size = case.tp * case.dp
        self.placement = RolloutPlacement(case.tp, case.dp, case.ep, self.world // size)
        self.target = {
            name: torch.full(value.shape, torch.nan, dtype=value.dtype, device="npu")
            for name, value in self.expected(1.0).items()
        }

    def build(self, checkpoint: Path) -> None:
        """Build the model that this rank trains."""
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        copies = self.case.copies
        mesh = init_device_mesh("npu", (copies, self.world // copies), mesh_dim_names=("copy", "shard"))
        for layer in self.model.model.layers:
            fully_shard(layer.npu(), mesh=mesh)
        fully_shard(self.model.npu(), mesh=mesh)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The live training tensors of this rank."""
        return local_tensors(self.model.state_dict())

    def shards(self) -> list[Shard]:
        """Return the shards of the model that this rank has."""
        return fsdp_shards(self.model.state_dict(), self.table.shapes)

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters that training changes."""
        return self.model.parameters()

    def expected(self, scale: float) -> dict[str, torch.Tensor]:
        """Return this rank's rollout weights by the naive reference, scaled, in the rollout's dtypes."""
        full = {name: value if name.endswith(BIAS) else value * scale for name, value in self.full.items()}
        if self.case.model == "deepseek":
            shape = DeepseekV3Shape.from_config(self.config)
            state = reference.rollout_state(full, shape, self.placement, self.rank)
        else:
            state = grouped_query_reference.rollout_state(full, shape_of(self.config), self.placement, self.rank)
        kind = getattr(torch, self.case.dtype)
        return {name: value if name.endswith(BIAS) else value.to(kind) for name, value in state.items()}

    def differing(self, scale: float = 1.0) -> list[str]:
        return [
            name
            for name, value in self.expected(scale).items()
            if not reference.same_bits(self.target[name].cpu(), value)
        ]

    def exporter(self, verify: bool = False) -> Exporter:
        self.layouts: list[Any] = [None] * self.world
        dist.all_gather_object(self.layouts, self.shards())
        names = tuple(self.table.shapes)
        served = [self.table.vllm_ascend(self.placement, rank) for rank in range(self.world)]
        train, rollout = (
            SideRegions(names, [regions_of(shards, names) for shards in layouts], layouts[self.rank])
            for layouts in (self.layouts, served)
        )
        return Exporter(
            train,
            self.tensors,
            rollout,
            without_memory({name: (tuple(value.shape), value.dtype) for name, value in self.target.items()}),
            dist.group.WORLD,
            torch.device("npu"),
            BUCKET,
            verify,
        )

    def update(self, exporter: Exporter, manifest: Manifest, version: int) -> None:
        """Hand the weights over within this process, through a copy, as verl does."""
        deliver(manifest, self.target, version, exporter.export(version))

    def counted(self) -> dict[str, int]:
        """Count bytes element by element.

        Returns:
            "bound": bytes that this rank serves but does not have. "owed": bytes that other ranks serve without having
            them, and this rank has; only counted without copies, so that it alone has them.
        """
        held = [self.mask(layout) for layout in self.layouts]
        bound = owed = 0
        for other in range(self.world):
            for shard in self.table.vllm_ascend(self.placement, other):
                if not shard.hf_name:
                    continue
                region = tuple(slice(*interval) for interval in shard.bounds)
                missing = ~held[other][shard.hf_name][region]
                size = self.target[shard.local].itemsize
                if other == self.rank:
                    bound += int(missing.sum()) * size
                elif self.case.copies == 1:
                    owed += int((missing & held[self.rank][shard.hf_name][region]).sum()) * size
        return {"bound": bound, "owed": owed}

    def mask(self, layout: list[Shard]) -> dict[str, torch.Tensor]:
        """Return a mask of the elements of each tensor that a layout contains."""
        masks = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in self.table.shapes.items()}
        for shard in layout:
            masks[shard.hf_name][tuple(slice(*interval) for interval in shard.bounds)] = True
        return masks


def shape_of(config: Any) -> GroupedQueryShape:
    experts = getattr(config, "num_experts", 0)
    width = config.moe_intermediate_size if experts else 0
    biased = config.model_type == "qwen2"
    return GroupedQueryShape.from_config(
        config, head_norms=not biased, bias=biased, experts=experts, expert_width=width
    )


def write_models(folder: Path) -> None:
    """Write the checkpoints of all cases."""
    for model in ("qwen3", "qwen3moe", "deepseek", "qwen2.5"):
        write_checkpoint(model, folder / model)
    tied = MODELS["qwen2.5"]()
    tied.tie_word_embeddings = True
    write_random_model(tied, folder / TIED)


def deliver(
    manifest: Manifest, target: dict[str, torch.Tensor], version: int, stream: Iterator[tuple[str, torch.Tensor]]
) -> None:
    importer = Importer(manifest, target, version)
    for name, content in stream:
        importer.take(name, content.clone())
    importer.finish()


def measured(rank: Rank) -> dict[str, Any]:
    """Run two updates of a case, the second with scaled weights, and measure the second."""
    exporter = rank.exporter()
    manifest = exporter.prepare()
    rank.update(exporter, manifest, 1)
    first = rank.differing()
    with torch.no_grad():
        for parameter in rank.parameters():
            parameter.mul_(GREW)
    addresses = {name: value.data_ptr() for name, value in rank.target.items()}
    torch.npu.reset_peak_memory_stats()
    before = int(torch.npu.memory_allocated())
    importer = Importer(manifest, rank.target, 2)
    for name, content in exporter.export(2):
        importer.take(name, content)
    importer.finish()
    torch.npu.synchronize()
    peak = int(torch.npu.max_memory_allocated()) - before
    return (
        dataclasses.asdict(exporter.report)
        | rank.counted()
        | {
            "first": first,
            "second": rank.differing(GREW),
            "peak": peak,
            "moved": [name for name, value in rank.target.items() if value.data_ptr() != addresses[name]],
        }
    )


def refused(folder: Path) -> dict[str, str]:
    """Return the worker's error for each planted fault on this rank; without an error the text is empty."""
    rank = Rank(folder, Case("qwen3", 2))
    exporter = rank.exporter(verify=True)
    manifest = exporter.prepare()
    rank.update(exporter, manifest, 1)
    found = {"nothing": "; ".join(rank.differing())}
    for fault in FAULTS:
        wrong = FAULTS[fault](manifest) if rank.rank == 1 else manifest
        stream = exporter.export(STALE if fault == "stale version" else 2)
        if fault == "dropped shard" and rank.rank == 1:
            dropped = next(name for name in manifest.names if name.startswith(handover.REMOTE))
            stream = ((name, content) for name, content in stream if name != dropped)
        try:
            deliver(wrong, rank.target, 2, stream)
            found[fault] = ""
        except HandoverError as error:
            found[fault] = str(error)
            for _ in stream:  # the other ranks wait for its collectives
                pass
    return found


STALE = 1


def _shifted(manifest: Manifest) -> Manifest:
    """Return a manifest that reads the first chunk from other dies 16 bytes too far."""
    name = next(name for name in manifest.names if name.startswith(handover.REMOTE))
    direction = manifest.buckets[name]
    first, *others = direction.chunks
    moved = dataclasses.replace(first, start=first.start + 16, stop=first.stop + 16)
    buckets = {**manifest.buckets, name: dataclasses.replace(direction, chunks=(moved, *others))}
    return dataclasses.replace(manifest, buckets=buckets)


FAULTS = {"wrong offset": _shifted, "stale version": lambda given: given, "dropped shard": lambda given: given}


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    found: dict[str, Any] = {case.name: measured(Rank(folder, case)) for case in CASES[world]}
    if world == 2:
        found["refused"] = refused(folder)
    (folder / f"{world}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
