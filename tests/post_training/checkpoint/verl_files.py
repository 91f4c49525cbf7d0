"""Checkpoints of a transformers model as verl 0.9.1's managers save them, without running verl."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from post_training.checkpoint.complete_files import write_complete

BUFFER = "e_score_correction_bias"


@contextmanager
def mesh_of(rank: int, replicas: int, ranks: int) -> Iterator[DeviceMesh]:
    """Give this process the place of one rank among replicas of a model over `ranks` ranks each."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=replicas * ranks)
    try:
        sizes, names = ((replicas, ranks), ("ddp", "fsdp")) if replicas > 1 else ((ranks,), ("fsdp",))
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def state_of(weights: Mapping[str, torch.Tensor], mesh: DeviceMesh, part: int) -> dict[str, torch.Tensor]:
    """Return a rank's state_dict: rows of each parameter, as FSDP2 cuts them, and whole buffers."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    state = {}
    for name, value in weights.items():
        if BUFFER in name:
            state[name] = value
            continue
        parts = value.chunk(mesh.size(mesh.ndim - 1))
        # A view into a larger storage, like FSDP2's padded shards.
        padded = torch.zeros(len(parts[0]) + 1, *value.shape[1:])
        own = parts[part] if part < len(parts) else value[:0]
        padded[: len(own)] = own
        placed: dict[str, Any] = {"shape": value.shape, "stride": value.stride(), "run_check": False}
        state[name] = DTensor.from_local(padded[: len(own)], mesh, placements, **placed)
    return state


def save_fsdp2(model: PreTrainedModel, run: Path, ranks: int, replicas: int = 1) -> Path:
    """Write step 7 of a run as verl's FSDP2 engine does, and return its folder."""
    step = run / "checkpoints" / "global_step_7"
    (step / "actor").mkdir(parents=True)
    for rank in range(replicas * ranks):
        with mesh_of(rank, replicas, ranks) as mesh:
            file = step / "actor" / f"model_world_size_{replicas * ranks}_rank_{rank}.pt"
            torch.save(state_of(model.state_dict(), mesh, rank % ranks), file)
    (step / "actor" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": replicas * ranks}))
    return finished(model, step, "huggingface")


def save_megatron(model: PreTrainedModel, run: Path, model_format: str = "huggingface") -> Path:
    """Write step 7 of a run as verl's engine for Megatron-core does with mbridge, and return its folder."""
    step = run / "checkpoints" / "global_step_7"
    places = {"huggingface": "model/huggingface"}
    folder = step / "actor" / places.get(model_format, "model/dist_ckpt")
    model.save_pretrained(folder, max_shard_size="40KB")
    contents = {"model": {"path": str(folder.relative_to(step / "actor")), "format": model_format}}
    (step / "actor" / "ckpt_contents.json").write_text(json.dumps({"framework": "megatron", "contents": contents}))
    return finished(model, step, "model/huggingface")


def finished(model: PreTrainedModel, step: Path, described: str) -> Path:
    """Write what every checkpoint has: config.json and tokenizer, the data's position, and the mark of a whole one."""
    folder = step / "actor" / described
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.torch_dtype = torch.float32
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (step / "data.pt").write_bytes(bytes(3))
    write_complete(step)
    return step
