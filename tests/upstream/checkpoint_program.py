"""Ranks that save and load the state of a MindSpeed optimizer, started as verl starts a worker.

FOLDER holds request.json and checkpoint/; ``from`` in the request is the folder of another step to load. Each rank
writes the form of its optimizer to ``rank<n>.json``; test_checkpoint.py checks the files of the steps.
"""

# Its first import is the prelude.
from tests.upstream.engine_program import start_engine

# isort: split
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from post_training.checkpoint.optimizer_shards import optimizer_shards
from tests.post_training.models.megatron.training_models_program import Layout
from tests.verl_patches.features.training_checkpoint.layouts_program import Trained
from verl_patches.features.training_checkpoint.restoring import load_training


def form_of(trained: Trained) -> dict[str, object]:
    """Return the optimizer parts' classes, and how many of its shards are on the host or count steps in the group."""
    rank = trained.rank()
    shards = optimizer_shards(rank.optimizer, rank.tensors)
    return {
        "classes": sorted({type(part).__name__ for part in rank.optimizer.chained_optimizers}),
        "away": sum(shard.away is not None for shard in shards),
        "step in group": sum(shard.step_in_group for shard in shards),
        "shards": len(shards),
    }


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    request = json.loads((folder / "request.json").read_text())
    layout, checkpoint = Layout(**request["layout"]), folder / "checkpoint"
    swap = f"actor_rollout_ref.overlay.mindspeed.swap_optimizer={request['swap']}"
    start_engine(checkpoint, layout, True, "actor_rollout_ref.overlay.precision=bfloat16", swap)
    dist.init_process_group("hccl")
    unbroken = Trained(checkpoint, layout, torch.bfloat16)
    unbroken.train()
    unbroken.save(folder / "saved")
    source = Path(request["from"]) if request["from"] else folder / "saved"
    other = Trained(checkpoint, layout, torch.bfloat16)
    load_training(source, other.rank())
    other.save(folder / "again")
    unbroken.train()
    unbroken.save(folder / "unbroken")
    other.train()
    other.save(folder / "resumed")
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(form_of(other)))
    dist.barrier()
