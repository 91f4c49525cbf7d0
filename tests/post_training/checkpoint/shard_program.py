"""Ranks that load converted shards of an FP8 source in several layouts into Megatron's model, and compute logits.

Each rank writes its results to ``rank<n>.json``, which test_training_from_shards.py checks.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import verl.workers.megatron_workers as megatron_workers

from post_training.checkpoint.files import CheckpointError
from post_training.layouts.model_tensors import train_tensors
from tests.post_training.models.megatron.training_models_program import Layout, Trial, logits_error, start_layout

LAYOUTS = [
    Layout("tensor2_expert2", tensor=2, expert=2),
    Layout("expert4", expert=4),
    Layout("tensor2_pipeline2", tensor=2, pipeline=2, stages=[2, 1]),
    Layout("pipeline2_expert2", pipeline=2, expert=2, stages=[2, 1]),
]


class ShardTrial(Trial):
    """The model of the training comparison, with weights from shards instead of HuggingFace files."""

    def __init__(self, folder: Path, layout: Layout, shards: Path) -> None:
        super().__init__(folder / "bf16", layout)
        for tensor in train_tensors([self.model]).values():
            tensor.data.fill_(float("nan"))
        megatron_workers.load_mcore_dist_weights([self.model], str(shards), is_value_model=False)


def rejection(folder: Path, layout: Layout, shards: Path) -> str:
    try:
        ShardTrial(folder, layout, shards)
    except CheckpointError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    results = {"logits": {}, "rejected": {}}
    for layout in LAYOUTS:
        start_layout(layout)
        trial = ShardTrial(folder, layout, folder / layout.name)
        results["logits"][layout.name] = logits_error(trial.run(reference["batch"], backward=False), reference)
    start_layout(LAYOUTS[0])
    for name in ("damaged", "expert4", "unfinished"):
        results["rejected"][name] = rejection(folder, LAYOUTS[0], folder / name)
    for name in ("other_weights", "published"):
        trial = ShardTrial(folder, LAYOUTS[0], folder / name)
        results[name] = logits_error(trial.run(reference["batch"], backward=False), reference)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
