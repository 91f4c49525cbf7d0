"""Two ranks agree on metrics of a step, some of which one rank names differently; test_agreement.py checks them.

Every rank writes ``rank<n>.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from post_training.report.run_error import RunError
from verl_patches.features.exact_loss.sums import sums_over_ranks
from verl_patches.features.measure.step_record import StepRecord, agreed, largest_over_ranks

ONE = {"samples/bytes_received": 4096.0, "timing_s/update": 2.0}
KNOWN = ("actor/pg_loss", "actor/kl_loss", "actor/ppo_kl")
# Rank 1's metrics in place of ONE, by case. In "renamed" the number is equal, so no size reveals the difference.
OTHERS = {
    "same": ONE,
    "lacks": {"timing_s/update": 3.0},
    "more": ONE | {"timing_s/ref": 1.0},
    "renamed": {"samples/bytes_received": 4096.0, "timing_s/values": 9.0},
}
REPORTED = {
    "same": ({"actor/pg_loss": 1.0, "actor/ppo_kl": 0.5}, {"actor/pg_loss": 2.0, "actor/ppo_kl": 0.25}),
    "other": ({"actor/pg_loss": 1.0, "actor/ppo_kl": 0.5}, {"actor/pg_loss": 2.0, "actor/kl_loss": 0.25}),
}
# Each rank's data, by case: log-prob differences by token, and the probability kept by the draw of each token.
SEEN: dict[str, list[tuple[list[float], list[float]]]] = {
    "both": [([3.0, 1.0], [0.5]), ([0.25] * 6, [1.0, 0.75, 0.75])],
    "one": [([], []), ([0.5, 1.5, 4.0], [0.25, 0.5])],
    "none": [([], []), ([], [])],
}


def told(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or the message of the RunError that it raises."""
    try:
        return call()
    except RunError as error:
        return str(error)


def started(stages: tuple[str, ...]) -> StepRecord:
    record = StepRecord()
    for stage in stages:
        record.began(stage)
    return record


def of_a_step(differences: list[float], left: list[float]) -> StepRecord:
    """Return the step record of a rank with these differences and kept probabilities."""
    record, rollout = StepRecord(), torch.tensor([differences])
    record.difference.add(rollout, torch.zeros_like(rollout), torch.ones_like(rollout))
    record.drew(sum(left), len(left))
    return record


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    found: dict[str, Any] = {
        name: told(lambda o=o: largest_over_ranks(o if rank else ONE)) for name, o in OTHERS.items()
    }
    found["step"] = told(lambda: agreed(started(("ref", "update") if rank else ("rollout", "update"))))
    for name, seen in SEEN.items():
        found[f"means {name}"] = agreed(of_a_step(*seen[rank]))
    device = torch.device("npu", rank)
    for name, of_ranks in REPORTED.items():
        found[f"sums {name}"] = told(lambda of=of_ranks: sums_over_ranks(of[rank], KNOWN, device, None))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
