"""Ranks that compare Qwen3 and Qwen3-MoE with transformers; test_qwen3_models.py checks their results."""

import json
import os
from pathlib import Path
from typing import Any

# The first import of this module is the prelude.
from tests.post_training.models.megatron.training_models_program import (
    Layout,
    Trial,
    compare_layout,
    logits_error,
    start_layout,
)

# isort: split
import torch
import torch.distributed as dist

LAYOUTS = {
    "qwen3": [
        Layout("data4"),
        Layout("tensor2", tensor=2),
        Layout("tensor2_pipeline2", tensor=2, pipeline=2),
    ],
    "qwen3_moe": [
        Layout("data4"),
        Layout("tensor2", tensor=2),
        Layout("tensor2_pipeline2", tensor=2, pipeline=2, stages=[3, 1]),
        Layout("tensor2_expert2", tensor=2, expert=2),
        Layout("pipeline2_expert2", pipeline=2, expert=2, stages=[1, 3]),
    ],
}
FAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"layernorm_epsilon": 0.1},
    "qwen3_moe": {"moe_router_norm_topk_prob": False},
}


def compare(folder: Path, name: str) -> dict[str, Any]:
    reference = torch.load(folder / "reference.pt", weights_only=True)
    results: dict[str, Any] = {}
    for layout in LAYOUTS[name]:
        start_layout(layout)
        results[layout.name] = compare_layout(folder, layout, reference)
    start_layout(LAYOUTS[name][0])
    wrong = Trial(folder / "checkpoint", LAYOUTS[name][0], **FAULTS[name])
    return {"layouts": results, "fault": logits_error(wrong.run(reference["batch"], backward=False), reference)}


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    results = {name: compare(folder / name, name) for name in LAYOUTS}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
