"""Replay recorded steps on one rank: a correct one, and several with one fault each.

`main(folder)` replays the steps `folder/<name of the fault>` and writes `<name>.<rank>.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from verl_plugin.step_record.folder import read_record
from verl_plugin.step_record.worker import Replay

TOLERANCE = 1e-5
# The module with this fault stays imported, so its step comes last.
POISONED = "poisoned"


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    names = sorted(path.name for path in folder.iterdir() if (path / "record.json").is_file() and path.name != POISONED)
    for name in (*names, POISONED):
        step = Replay(*read_record(folder / name), [], TOLERANCE, layers=name == POISONED)
        if name == POISONED:
            step.config.actor_rollout_ref.model.external_lib = ["tests.stack_2026.step_record.poisoned"]
        found = step.run("update")
        content = {"compared": [vars(each) for each in found], "origins": step.origins}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(content))
    dist.barrier()
    dist.destroy_process_group()
