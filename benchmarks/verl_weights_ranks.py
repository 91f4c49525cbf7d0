"""One process of the benchmark of verl's weight transfers: a training rank, the worker of a die, or a rollout rank.

`main(folder)` reads `request.json` and the checkpoint in `folder`. If training and rollout share dies, a die has two
processes, connected by verl's own sender and receiver; otherwise the ranks of both sides join with verl's checkpoint
engines. Process 0 writes everybody's measurements to `measured.json`.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from transformers import AutoConfig
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.trainer.config import CheckpointConfig
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

import verl_plugin.alltoallv.checkpoint_engine  # noqa: F401
import verl_plugin.alltoallv.engines  # noqa: F401
import verl_plugin.megatron_core  # noqa: F401
from npu_emulator import meters
from post_training.layouts.layout import PADDING, RolloutPlacement, Shard
from post_training.models.families import table_for
from post_training.reshard.handover import Importer
from tests.post_training.layouts.grouped_query_reference import rollout_state
from tests.post_training.layouts.reference import same_bits
from tests.stack_2026.verl_plugin.fsdp_program import shape_of
from verl_plugin.alltoallv.addresses import control_path
from verl_plugin.alltoallv.control import Control, Description
from verl_plugin.alltoallv.export import AlltoallvExport
from verl_plugin.alltoallv.settings import AlltoallvSettings
from verl_plugin.alltoallv.transfer import ray_job

COUNTED = ("wall_seconds", "cpu_seconds", "peak_bytes", "collectives", "bytes_handed_over", "bytes_copied")
NAIVE, HCCL, ALLTOALLV = "naive", "hccl", "alltoallv"
# verl's engine for HCCL registers itself under this name.
REGISTERED = {HCCL: "nccl", ALLTOALLV: "alltoallv"}
ROLLOUT_TP = 2
Take = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Request:
    """The measurement to make.

    Attributes:
        separate: whether training and rollout have dies of their own, half of `dies` each.
        tensor, pipeline, experts: parallel sizes of Megatron.
    """

    dies: int
    separate: bool
    repeats: int
    bucket_megabytes: int
    tensor: int
    pipeline: int
    experts: int

    @property
    def trainers(self) -> int:
        return self.dies // 2 if self.separate else self.dies

    @property
    def served(self) -> int:
        """The number of dies that serve."""
        return self.dies - self.trainers if self.separate else self.dies

    @property
    def processes(self) -> int:
        return self.trainers + self.served

    @property
    def ways(self) -> tuple[str, str]:
        return (HCCL if self.separate else NAIVE), ALLTOALLV

    @property
    def rollout(self) -> RolloutPlacement:
        """One instance, its experts over all dies that serve."""
        tp = min(ROLLOUT_TP, self.served)
        return RolloutPlacement(tp=tp, dp=self.served // tp, ep=self.served)


class Process:
    """A process of either side, with its place, the store shared by all, and counters around an update."""

    def __init__(self, request: Request, folder: Path, store: dist.Store) -> None:
        self.request, self.folder, self.store = request, folder, store
        self.number = int(os.environ["RANK"])
        self.trains = self.number < request.trainers
        self.place = self.number if self.trains else self.number - request.trainers
        self.die = self.number if request.separate else self.place
        self.met = 0
        torch.npu.set_device(self.die)
        dist.init_process_group(
            "cpu:gloo,npu:hccl" if self.trains else "cpu:gloo",
            store=dist.PrefixStore("trainers" if self.trains else "workers", store),
            rank=self.place,
            world_size=request.trainers if self.trains else request.served,
        )

    def update(self, way: str) -> None:
        """This process's part of an update."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait for all processes."""
        self.met += 1
        name = f"met {self.met}"
        if self.store.add(name, 1) == self.request.processes:
            self.store.set(f"{name} all", "yes")
        self.store.wait([f"{name} all"])

    def leave(self) -> None:
        """End this process; the one that keeps the store is the last to go."""
        keys = [f"left {number}" for number in range(1, self.request.processes)]
        if self.number:
            self.store.set(keys[self.number - 1], "yes")
        else:
            self.store.wait(keys)
        os._exit(0)

    def measure(self, way: str) -> dict[str, float]:
        """Run an update with the others; return its cost in this process. Peak memory excludes memory that stays."""
        torch.npu.empty_cache()
        meters.reset_phases()
        device = str(self.die)
        resident = meters.snapshot()["memory"].get(device, {}).get("allocated", 0)
        self.meet()
        with meters.phase("update"):
            wall, cpu = time.perf_counter(), time.process_time()
            self.update(way)
            torch.npu.synchronize()
            spent = time.perf_counter() - wall, time.process_time() - cpu
        counted = meters.snapshot()["phases"]["update"]
        groups = [group for kind in counted["collectives"].values() for group in kind.values()]
        own = (
            *spent,
            counted["peak_bytes"].get(device, 0) - resident,
            sum(group["count"] for group in groups),
            sum(group["bytes"] for group in groups),
            counted["copies"]["device_to_device"]["bytes"],
        )
        self.meet()
        return dict(zip(COUNTED, own, strict=True))


class Trainer(Process):
    """A rank of verl's engine for Megatron, extended so that it can send its weights in both ways."""

    def __init__(self, request: Request, folder: Path, store: dist.Store) -> None:
        super().__init__(request, folder, store)
        self.engine = new_engine(folder, request)
        self.joined = Joined(self) if request.separate else None

    def update(self, way: str) -> None:
        if self.joined is not None:
            self.joined.update(way, lambda: self.weights(way))
            return
        # Buckets larger than verl's are handed to the worker in place; docs/reshard.md recommends that for alltoallv.
        bucket = 1 if way == ALLTOALLV else self.request.bucket_megabytes
        sender = BucketedWeightSender(handle_of(self.die), bucket, use_shm=False)
        asyncio.run(sender.async_send_weights(self.weights(way)))

    def weights(self, way: str) -> Any:
        """Return the weights that verl's engine yields, with this project's extension or without."""
        source: Any = self.engine if way == ALLTOALLV else super(AlltoallvExport, self.engine)
        return source.get_per_tensor_param()[0]


class Rollout(Process):
    """The stand-in of a die's vLLM worker: live weights in vLLM's layout, and the worker's control socket."""

    def __init__(self, request: Request, folder: Path, store: dist.Store) -> None:
        super().__init__(request, folder, store)
        config = AutoConfig.from_pretrained(folder)
        full = safetensors.torch.load_file(folder / "model.safetensors")
        state = rollout_state(full, shape_of(config), request.rollout, self.place)
        self.expected = {name: value.bfloat16() for name, value in state.items()}
        self.live = {name: torch.empty_like(value, device="npu") for name, value in self.expected.items()}
        self.by_name: dict[str, list[Shard]] = {}
        for shard in table_for(config).vllm_ascend(request.rollout, self.place):
            self.by_name.setdefault(shard.hf_name, []).append(shard)
        weights = {name: (tuple(value.shape), value.dtype) for name, value in self.live.items()}
        settings = AlltoallvSettings(bucket_megabytes=request.bucket_megabytes)
        self.control = Control(control_path(ray_job(), self.place), Description(weights, request.rollout, settings))
        self.joined = Joined(self) if request.separate else None
        self.importer: Importer | None = None

    def update(self, way: str) -> None:
        take = self.take_bucket if way == ALLTOALLV else self.take_whole
        if self.joined is not None:
            self.joined.update(way, None, take)
        else:
            receiver = BucketedWeightReceiver(handle_of(self.die), torch.device("npu", self.die), use_shm=False)
            receiver.receive_weights(lambda buckets, _: [take(*each) for each in buckets])
        if self.importer is not None:
            self.importer.finish()
            self.importer = None

    def take_bucket(self, name: str, content: torch.Tensor) -> None:
        manifest = self.control.manifest
        assert manifest is not None
        self.importer = self.importer or Importer(manifest, self.live, self.control.version)
        self.importer.take(name, content)

    def take_whole(self, name: str, tensor: torch.Tensor) -> None:
        """Keep this die's part of a whole tensor, as vLLM's loaders do."""
        for shard in self.by_name.get(name, ()):
            shard.locate(self.live).copy_(tensor[tuple(slice(*bounds) for bounds in shard.bounds)])

    def differing(self, way: str) -> list[str]:
        """Update weights that are all NaN; returns those that are not transformers' afterwards."""
        for value in self.live.values():
            value.fill_(torch.nan)
        for shard in self.by_name.get(PADDING, ()):
            shard.locate(self.live).zero_()
        self.measure(way)
        return [name for name, value in self.expected.items() if not same_bits(self.live[name].cpu(), value)]


class Joined:
    """One rank in the process groups of verl's checkpoint engines, which it uses in the order of verl's manager."""

    def __init__(self, process: Process) -> None:
        self.process, self.request, self.prepared = process, process.request, 0
        master = {"is_master": True} if process.number == 0 else {}
        size = self.request.bucket_megabytes << 20
        self.engines = {
            way: CheckpointEngineRegistry.new(REGISTERED[way], bucket_size=size, **master) for way in self.request.ways
        }

    def update(self, way: str, weights: Any, take: Take | None = None) -> None:
        """Send `weights`, or hand the received weights to `take`."""
        engine: Any = self.engines[way]
        self.prepared += 1
        told = self._exchanged(engine.prepare())
        sides = type(engine).build_topology(self.request.trainers, self.request.served, told)
        own = {key: values[self.process.place] for key, values in sides[not self.process.trains].items()}
        engine.init_process_group(**own)
        binding = getattr(engine, "pyhccl", None)
        if binding is not None and binding.disabled:
            raise RuntimeError("vLLM-Ascend cannot bind HCCL's library, so verl's engine would silently move nothing")
        if take is None:
            asyncio.run(engine.send_weights(weights(), global_steps=self.prepared))
        else:
            asyncio.run(_take_all(engine.receive_weights(global_steps=self.prepared), take))
        engine.finalize()

    def _exchanged(self, value: Any) -> list[Any]:
        """Exchange a value with all processes; returns their values in order of the processes."""
        keys = [f"prepared {self.prepared} {number}" for number in range(self.request.processes)]
        self.process.store.set(keys[self.process.number], pickle.dumps(value))
        return [pickle.loads(self.process.store.get(key)) for key in keys]


async def _take_all(
    weights: AsyncIterator[tuple[str, torch.Tensor]], take: Callable[[str, torch.Tensor], None]
) -> None:
    async for name, content in weights:
        take(name, content)


def new_engine(folder: Path, request: Request) -> Any:
    """Build verl's engine for Megatron-core, without an optimizer."""
    sizes = {
        "tensor_model_parallel_size": request.tensor,
        "pipeline_model_parallel_size": request.pipeline,
        "expert_model_parallel_size": request.experts,
        "expert_tensor_parallel_size": 1,
    }
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=str(folder), load_tokenizer=False, use_remove_padding=False),
        engine_config=McoreEngineConfig(vanilla_mbridge=True, use_remove_padding=False, forward_only=True, **sizes),
        # verl reads it although there is no optimizer.
        optimizer_config=McoreOptimizerConfig(lr=0.0),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def handle_of(die: int) -> str:
    """Return the address of verl's socket between the two processes of a die."""
    return f"ipc:///tmp/rl-colocate-zmq-{ray_job()}-replica-0-rank-{die}.sock"


def measured(process: Process) -> dict[str, Any]:
    """Check each way, then measure each `repeats` times in turn; returns this process's numbers."""
    request = process.request
    found: dict[str, Any] = {"differing": {}, "ways": {way: [] for way in request.ways}}
    for way in request.ways:
        if isinstance(process, Rollout):
            found["differing"][way] = process.differing(way)
        else:
            process.measure(way)
    for number in range(request.repeats):
        for way in request.ways if number % 2 else reversed(request.ways):
            found["ways"][way].append(process.measure(way))
    return found


def main(folder: Path) -> None:
    request = Request(**json.loads((folder / "request.json").read_text()))
    limit = datetime.timedelta(seconds=600)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=os.environ["RANK"] == "0", timeout=limit)
    os.environ["VERL_RAY_JOB_ID"] = f"benchmark.{port}"
    trains = int(os.environ["RANK"]) < request.trainers
    process = (Trainer if trains else Rollout)(request, folder, store)
    (folder / f"{process.number}.json").write_text(json.dumps(measured(process)))
    process.leave()
