"""Training and rollout ranks on separate dies, joined by verl's checkpoint engine `alltoallv`.

Each side has its own world, like verl's trainers and its rollout workers. The engine comes from verl's registry and is
called in the order of verl's `CheckpointEngineManager`; training hands over its weights through the methods that the
plugin adds to verl's engines; each rollout rank has the real control socket of a vLLM worker. `main` writes a rank's
results to `<trainers>+<workers>.<rank>.json`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from verl.checkpoint_engine import CheckpointEngineRegistry

import verl_plugin.alltoallv.checkpoint_engine  # noqa: F401
from post_training.reshard import exchange, handover
from post_training.reshard.generation import WeightsGeneration
from post_training.reshard.handover import Importer
from tests.stack_2026.verl_plugin.failing_program import at_second_pack, die, told
from tests.stack_2026.verl_plugin.fsdp_program import BUCKET, GREW, TIED, Case, Rank
from verl_plugin.alltoallv import control
from verl_plugin.alltoallv.addresses import control_path
from verl_plugin.alltoallv.control import Control, Description
from verl_plugin.alltoallv.fsdp2_engine import AlltoallvFSDP2
from verl_plugin.alltoallv.settings import AlltoallvSettings

CULPRIT = 1
TIMEOUT = 8
REPLICAS_OF_TRAINERS = 3
"""vLLM instances on the training dies; verl's `separate_async` numbers them before those on the rollout's own dies."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Sizes of the two sides, and their cases.

    Attributes:
        trainers: Number of training ranks.
        workers: Number of rollout ranks.
        cases: Cases to run one after another.
        megatron: Sizes of tensor, pipeline and expert parallelism if Megatron-core trains; None for FSDP2.
        dies_per_node: The engine's option of that name.
    """

    trainers: int
    workers: int
    cases: tuple[Case, ...]
    megatron: tuple[int, int, int] | None = None
    dies_per_node: int | None = None

    @property
    def name(self) -> str:
        sizes = f"megatron{''.join(map(str, self.megatron))}." if self.megatron else ""
        nodes = f"nodes{self.dies_per_node}." if self.dies_per_node else ""
        return f"{sizes}{nodes}{self.trainers}+{self.workers}"


RUNS = {
    run.name: run
    for run in (
        Run(
            2,
            2,
            (
                Case("qwen3", 2),
                Case("qwen3", 1, dtype="float32"),
                Case("qwen3", 1, copies=2),
                Case("qwen3moe", 2, ep=2),
                Case("deepseek", 2, dtype="float32"),
            ),
        ),
        Run(1, 2, (Case("qwen3moe", 1, 2, 2),)),
        Run(3, 1, (Case("qwen3", 1),)),
        Run(2, 2, (Case("qwen3moe", 2, ep=2), Case("deepseek", 1)), megatron=(1, 1, 2)),
        Run(2, 1, (Case("qwen3moe", 1), Case("qwen2.5", 1)), megatron=(2, 1, 1)),
        Run(2, 1, (Case("qwen3", 1), Case(TIED, 1)), megatron=(1, 2, 1)),
        Run(2, 2, (Case("qwen3", 1, copies=2), Case("qwen3moe", 2, ep=2)), dies_per_node=2),
        Run(2, 2, (Case("deepseek", 2, ep=2), Case("qwen3", 1, copies=2)), megatron=(1, 2, 1), dies_per_node=2),
    )
}


class Offering(AlltoallvFSDP2):
    """A stand-in for verl's engine, as far as the plugin uses it."""

    def __init__(self, rank: Rank) -> None:
        self.module = rank.model
        self.model_config: Any = SimpleNamespace(hf_config=rank.config, lora_rank=0, lora={})


def megatron_engine(rank: Any) -> Any:
    """Make the stand-in for Megatron-core, which only some runs import."""
    from verl_plugin.alltoallv.megatron_engine import AlltoallvMegatron

    engine = AlltoallvMegatron()
    engine.module, engine.tf_config = rank.models, rank.transformer_config
    engine.model_config = SimpleNamespace(hf_config=rank.config, lora_rank=0, lora={})
    return engine


class Served(Rank):
    """Rollout rank that does no training."""

    def build(self, checkpoint: Path) -> None:
        """Keep nothing of the checkpoint: training's model is on other ranks."""


class Member:
    """One rank of either side, with its engine from verl's registry."""

    def __init__(self, run: Run, store: dist.Store) -> None:
        self.run, self.store = run, store
        self.rank = int(os.environ["RANK"])
        self.trains = self.rank < run.trainers
        self.prepared = 0
        arguments = {"is_master": True} if self.rank == 0 else {}
        self.engine: Any = CheckpointEngineRegistry.new(
            "alltoallv", bucket_size=BUCKET, timeout_seconds=TIMEOUT, **arguments
        )

    def join(self) -> None:
        """Join the process group as `CheckpointEngineManager.build_process_group` does."""
        self.prepared += 1
        keys = [f"{self.prepared}.{rank}" for rank in range(self.run.trainers + self.run.workers)]
        self.store.set(keys[self.rank], pickle.dumps(self.engine.prepare()))
        metadata = [pickle.loads(self.store.get(key)) for key in keys]
        sides = type(self.engine).build_topology(self.run.trainers, self.run.workers, metadata)
        place = self.rank if self.trains else self.rank - self.run.trainers
        self.engine.init_process_group(**{key: values[place] for key, values in sides[not self.trains].items()})

    def take(self, case: Case, folder: Path) -> None:
        """Start a case."""
        self.engine = type(self.engine)(BUCKET, self.rank == 0, TIMEOUT) if self.prepared else self.engine
        if self.trains:
            self.side = trainer_of(self.run)(folder, dataclasses.replace(case, tp=1, dp=1, ep=1))
            self.offering = megatron_engine(self.side) if self.run.megatron else Offering(self.side)
            return
        self.side = Served(folder, case)
        weights = {name: (tuple(value.shape), value.dtype) for name, value in self.side.target.items()}
        placement = dataclasses.replace(self.side.placement, instances=1)
        size, place = placement.world_size, self.rank - self.run.trainers
        replica = REPLICAS_OF_TRAINERS + place // size
        os.environ |= {"WG_PREFIX": f"rollout_standalone_{replica}", "WORLD_SIZE": str(size), "RANK": str(place % size)}
        path = control_path(os.environ["VERL_RAY_JOB_ID"], replica * size + place % size)
        self.control = Control(
            path, Description(weights, placement, AlltoallvSettings(dies_per_node=self.run.dies_per_node))
        )
        self.generation = WeightsGeneration()

    def update(self, step: int) -> dict[str, Any]:
        """Run one update in the order of verl's manager, and return a training rank's metrics."""
        self.join()
        metrics: dict[str, Any] = {}
        if self.trains:
            weights, _ = self.offering.get_per_tensor_param()
            metrics = asyncio.run(self.engine.send_weights(weights, global_steps=step))
        else:
            asyncio.run(self._receive(step))
        self.engine.finalize()
        return metrics

    async def _receive(self, step: int) -> None:
        """Take an update from verl's hand-over as vLLM's worker does."""
        importer = None
        try:
            with self.generation.writing():
                async for name, content in self.engine.receive_weights(global_steps=step):
                    manifest = self.control.manifest
                    assert manifest is not None
                    importer = importer or Importer(manifest, self.side.target, self.control.version)
                    importer.take(name, content)
                assert importer is not None
                importer.finish()
        finally:
            self.control.settle()

    def grow(self) -> None:
        if self.trains:
            with torch.no_grad():
                for parameter in self.side.parameters():
                    parameter.mul_(GREW)


def trainer_of(run: Run) -> type:
    if not run.megatron:
        return Rank
    from tests.stack_2026.verl_plugin.megatron_program import MegatronRank

    return MegatronRank


def measured(member: Member) -> dict[str, Any]:
    """Run two updates of a case, the second with scaled weights, and measure the second."""
    metrics = member.update(1)
    side = member.side
    first = [] if member.trains else side.differing()
    member.grow()
    addresses = {name: value.data_ptr() for name, value in side.target.items()}
    torch.npu.reset_peak_memory_stats()
    before = int(torch.npu.memory_allocated())
    member.update(2)
    torch.npu.synchronize()
    needed = [] if member.trains else side.table.vllm_ascend(side.placement, side.rank)
    sizes = [(shard, torch.Size(shard.extents).numel()) for shard in needed if shard.hf_name]
    return dataclasses.asdict(member.engine.report) | {
        "first": first,
        "second": [] if member.trains else side.differing(GREW),
        "peak": int(torch.npu.max_memory_allocated()) - before,
        "moved": [name for name, value in side.target.items() if value.data_ptr() != addresses[name]],
        "bound": sum(count * side.target[shard.local].itemsize for shard, count in sizes),
        "metrics": metrics,
    }


def stale(member: Member) -> dict[str, Any]:
    """Let one training rank send the previous step's weights, and then run an update that succeeds."""
    step = 2 if member.rank == CULPRIT else 3
    found = {"update": told(lambda: member.update(step))}
    if not member.trains:
        found["sampling"] = told(member.generation.require_whole)
    found["next"] = told(lambda: member.update(4))
    if not member.trains:
        found["sampling again"] = told(member.generation.require_whole)
        found["differing"] = member.side.differing(GREW)
    return found


def dying(member: Member) -> dict[str, Any]:
    """Let a training rank die in the second bucket of an update."""
    if member.rank == CULPRIT:
        exchange.pack = at_second_pack(die)
    found = {"update": told(lambda: member.update(5))}
    if not member.trains:
        found["sampling"] = told(member.generation.require_whole)
    return found


def start(run: Run) -> dist.Store:
    """Give each side its own world; the rollout's is host-only, as in verl. Return the store of both."""
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    os.environ["VERL_RAY_JOB_ID"] = f"separate.{os.environ['MASTER_PORT']}"
    limit = datetime.timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, timeout=limit)
    trains = rank < run.trainers
    dist.init_process_group(
        "cpu:gloo,npu:hccl" if trains else "cpu:gloo",
        store=dist.PrefixStore("trainers" if trains else "workers", store),
        rank=rank if trains else rank - run.trainers,
        world_size=run.trainers if trains else run.workers,
        timeout=limit,
    )
    if trains and run.megatron:
        from megatron.core import parallel_state, tensor_parallel

        tensor, pipeline, experts = run.megatron
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            expert_model_parallel_size=experts,
            expert_tensor_parallel_size=tensor,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    return store


def main(folder: Path) -> None:
    run = RUNS[(folder / "run.txt").read_text()]
    rank = int(os.environ["RANK"])
    if (dies := (folder / "dies").exists()) and rank == CULPRIT and (child := os.fork()):
        os.waitpid(child, 0)  # hides the killed child from the harness, which would end the other ranks too soon
        return
    os.environ["HCCL_EXEC_TIMEOUT"] = str(TIMEOUT // 2)
    handover.MEMBERSHIP_CHECK_S = 3.5  # on a busy machine the survivors notice up to three seconds apart
    control.LEAVE_SECONDS = 0.0  # this thread is the worker's too
    if run.megatron and rank < run.trainers:
        trainer_of(run)  # importing it sets up Megatron
    member = Member(run, start(run))
    found: dict[str, Any] = {}
    for case in run.cases[:1] if dies else run.cases:
        member.take(case, folder)
        found[case.name] = measured(member)
    if run.trainers > CULPRIT and not run.megatron:
        found["fails"] = dying(member) if dies else stale(member)
    (folder / f"{run.name}.{rank}.json").write_text(json.dumps(found))
    if dies and rank == 0:
        time.sleep(6)  # this rank hosts the store, which the others may still need
    os._exit(0)
