"""Run training ranks with verl's sender, each with a worker in a process of its own, one of which fails in an update.

`way.txt` in the folder says how. `main` writes the rank's result of each update to `dead.<rank>.json`.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from post_training.layouts.layout import RolloutPlacement
from post_training.reshard import handover
from post_training.reshard.failure import ReshardError
from post_training.reshard.handover import HandoverError
from tests.stack_2026.verl_plugin.fsdp_program import Case, Rank
from verl_plugin.alltoallv.addresses import control_path
from verl_plugin.alltoallv.control import Control, Description
from verl_plugin.alltoallv.settings import AlltoallvSettings
from verl_plugin.alltoallv.transfer import Training, WeightTransfer

CULPRIT, WORLD, UPDATES = 1, 2, 3
FAILING = 2
BUCKET = 150_000


def serve(folder: Path, rank: int, job: str, way: str) -> None:
    """Take updates as a vLLM worker does; the culprit's fails in the second one."""
    from verl_plugin.alltoallv.worker import Buckets, WatchfulReceiver, receive_all

    described = folder / f"description.{rank}"
    while not described.exists():
        time.sleep(0.05)
    description: Description = pickle.loads(described.read_bytes())
    torch.npu.set_device(rank)
    control = Control(control_path(job, rank), description)
    for update in range(1, UPDATES + 1):
        failing = rank == CULPRIT and update == FAILING
        if failing and way == "absent":
            os.kill(os.getpid(), signal.SIGKILL)
        arrived: list[str] = []

        def write(buckets: Buckets, failing: bool = failing, arrived: list[str] = arrived) -> None:
            arrived.extend(name for name, _ in buckets)
            if failing and len(arrived) >= 2:
                if way == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if way == "raises":
                    raise HandoverError("a planted failure")

        receiver = WatchfulReceiver(description.handle, torch.device("npu", rank), False, control, description.handle)
        try:
            receive_all(receiver.receive_weights, write)
        except HandoverError as error:
            (folder / f"worker.{rank}.{update}.error").write_text(str(error))
        control.settle()


def update(transfer: WeightTransfer, handle: str) -> dict[str, Any]:
    """Send the weights with verl's sender."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    sender, start = BucketedWeightSender(handle, 1), time.monotonic()
    sender.bucket_size = BUCKET
    text = ""
    try:
        asyncio.run(sender.async_send_weights(transfer.buckets()))
    except (HandoverError, ReshardError) as error:
        text = f"{type(error).__name__}: {error}"
    return {"text": text, "seconds": time.monotonic() - start}


def main(folder: Path) -> None:
    rank, way = int(os.environ["RANK"]), (folder / "way.txt").read_text()
    job = f"dead.{os.environ['MASTER_PORT']}"
    worker = os.fork()
    if not worker:
        serve(folder, rank, job, way)
        os._exit(0)
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", timeout=datetime.timedelta(seconds=60))
    of_rank = Rank(folder, Case("qwen3", 1))
    handover.PART_ELEMENTS = BUCKET  # several buckets, like a real model
    weights = {name: (tuple(value.shape), value.dtype) for name, value in of_rank.target.items()}
    handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-{rank}.sock"
    description = Description(weights, RolloutPlacement(1), AlltoallvSettings(), process=worker, handle=handle)
    partial = folder / f"partial.{rank}"
    partial.write_bytes(pickle.dumps(description))
    partial.rename(folder / f"description.{rank}")
    training = Training(of_rank.config, of_rank.tensors, of_rank.shards)
    transfer = WeightTransfer(training, control_path(job, rank), dist.group.WORLD, torch.device("npu", rank))
    found = [update(transfer, handle) for _ in range(UPDATES)]
    (folder / f"dead.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os.kill(worker, signal.SIGKILL)
    os._exit(0)
