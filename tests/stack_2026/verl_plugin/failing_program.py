"""Run training ranks, one of which fails in the second update in the way named by `way.txt` in the folder.

Each rank has a stand-in for its die's vLLM worker in its own process, with the worker's real control socket. `main`
writes the rank's errors, and whether the worker would sample, to `failing.<rank>.json`.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from post_training.layouts.layout import RolloutPlacement
from post_training.reshard import exchange, handover
from post_training.reshard.failure import ReshardError
from post_training.reshard.generation import WeightsGeneration, WeightsNotWholeError
from post_training.reshard.handover import HandoverError, Importer
from tests.stack_2026.verl_plugin.fsdp_program import Case, Rank
from verl_plugin.alltoallv import control
from verl_plugin.alltoallv.addresses import control_path
from verl_plugin.alltoallv.control import Control, Description
from verl_plugin.alltoallv.settings import AlltoallvSettings
from verl_plugin.alltoallv.transfer import Training, WeightTransfer

CULPRIT, WORLD = 1, 3
TIMEOUT = 8.0
BUCKET = 150_000


def at_second_pack(act: Callable[[], None]) -> Callable[..., None]:
    """Return a `pack` that calls `act` before packing its second bucket."""
    upstream, calls = exchange.pack, []

    def packing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            act()
        upstream(*arguments)

    return packing


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("a planted failure")


class Die:
    """A training rank and the stand-in for its worker."""

    def __init__(self, folder: Path, job: str) -> None:
        self.rank = Rank(folder, Case("qwen3", 1))
        weights = {name: (tuple(value.shape), value.dtype) for name, value in self.rank.target.items()}
        description = Description(weights, RolloutPlacement(1), AlltoallvSettings())
        self.control = Control(control_path(job, dist.get_rank()), description)
        training = Training(self.rank.config, self.rank.tensors, self.rank.shards)
        device = torch.device("npu", dist.get_rank())
        self.transfer = WeightTransfer(training, control_path(job, dist.get_rank()), dist.group.WORLD, device)
        self.generation = WeightsGeneration()

    def update(self) -> None:
        """Take an update as the worker does."""
        with self.generation.writing():
            importer = None
            for name, content in self.transfer.buckets():
                manifest = self.control.manifest
                assert manifest is not None
                importer = importer or Importer(manifest, self.rank.target, self.control.version)
                importer.take(name, content)
            assert importer is not None
            importer.finish()
        self.control.settle()


def told(action: Callable[[], object]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        action()
    except (ReshardError, HandoverError, WeightsNotWholeError) as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"type": None, "text": "", "seconds": time.monotonic() - start}


def main(folder: Path) -> None:
    rank, way = int(os.environ["RANK"]), (folder / "way.txt").read_text()
    if rank == CULPRIT and (child := os.fork()):
        os.waitpid(child, 0)  # hides the killed child from the harness, which would end the other ranks too soon
        return
    os.environ["HCCL_EXEC_TIMEOUT"] = str(int(TIMEOUT) // 2)
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", timeout=datetime.timedelta(seconds=TIMEOUT))
    handover.MEMBERSHIP_CHECK_S = 3.5  # on a busy machine the survivors notice up to three seconds apart
    control.LEAVE_SECONDS = 0.0  # this thread is the worker's too
    die_of_rank = Die(folder, f"failing.{os.environ['MASTER_PORT']}")
    handover.PART_ELEMENTS = BUCKET  # several buckets, like a real model
    found = {"first": told(die_of_rank.update) | {"differing": die_of_rank.rank.differing()}}
    pack = exchange.pack
    if rank == CULPRIT and way != "nothing":
        exchange.pack = at_second_pack(die if way == "dies" else fail)
    found["second"] = told(die_of_rank.update)
    found["worker"] = told(die_of_rank.control.check)
    found["sampling"] = told(die_of_rank.generation.require_whole)
    if way == "raises":
        exchange.pack = pack
        die_of_rank.control.settle()
        found["third"] = told(die_of_rank.update) | {"differing": die_of_rank.rank.differing()}
        found["sampling again"] = told(die_of_rank.generation.require_whole)
    (folder / f"failing.{rank}.json").write_text(json.dumps(found))
    if way == "dies" and rank == 0:
        time.sleep(6)  # this rank hosts the store, which the others may still need
    os._exit(0)
