"""One rank of the reshard benchmark: the same weights by three ways into the same live vLLM-Ascend model.

`main(folder)` reads `request.json` (repeats, bucket_bytes) and `config.json`, and rank 0 writes everybody's
measurements to `measured.json`.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import verl_patches.prelude_patch  # noqa: F401  (before every upstream package)

# isort: split
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
import verl.workers.megatron_workers  # noqa: F401  (applies the overlay's bridge to megatron-core 0.8.0)
from megatron.core import parallel_state
from torch import nn
from transformers import AutoConfig

from benchmarks.published_path import PublishedPath
from benchmarks.verl_path import TrainingModule, VerlPath
from npu_emulator import meters
from post_training.layouts.layout import RolloutPlacement, TrainPlacement
from post_training.layouts.model_tensors import rollout_tensors
from post_training.reshard.resharder import resharder_for
from tests.post_training.layouts.reference import State
from tests.verl_patches.features.reshard.load_weights_program import Model, build_rollout, differing

TP, PP, EP = 2, 2, 2


class Way:
    """One way to move the weights, with each repeat's cost: the slowest or largest rank, or the sum of all ranks."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.results: dict[str, list[float]] = {
            "wall_seconds": [],
            "cpu_seconds": [],
            "peak_bytes": [],
            "collectives": [],
            "bytes_handed_over": [],
            "bytes_transposed": [],
        }

    def measure(self) -> None:
        """Run once on all ranks together and keep the cost. Peak memory excludes memory that is always allocated."""
        dist.barrier()
        meters.reset_phases()
        resident = torch.npu.memory_allocated()
        torch.npu.reset_peak_memory_stats()
        with meters.phase("run"):
            wall, cpu = time.perf_counter(), time.process_time()
            self._run()
            torch.npu.synchronize()
            spent = time.perf_counter() - wall, time.process_time() - cpu
        peak = torch.npu.max_memory_allocated() - resident
        counted = meters.snapshot()["phases"]["run"]
        groups = [group for kind in counted["collectives"].values() for group in kind.values()]
        collectives = sum(group["count"] for group in groups), sum(group["bytes"] for group in groups)
        own = (*spent, peak, *collectives, counted["copies"]["transposing_on_device"]["bytes"])
        gathered: list[tuple[float, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        walls, cpus, peaks, counts, sizes, transposed = zip(*gathered, strict=True)
        costs = (max(walls), sum(cpus), max(peaks), max(counts), sum(sizes), sum(transposed))
        for values, cost in zip(self.results.values(), costs, strict=True):
            values.append(cost)


def placements(world: int, layers: int) -> tuple[TrainPlacement, RolloutPlacement]:
    """Return placements: training in two stages, experts over TP x EP; one rollout, its experts over all ranks."""
    first = -(-layers // PP)
    train = TrainPlacement(tp=TP, pp=PP, ep=EP, dp=world // TP // PP, num_layer_list=(first, layers - first))
    return train, RolloutPlacement(tp=TP, dp=world // TP, ep=world)


def ways(model: Model, hf_config: object, bucket_bytes: int, rank: int) -> tuple[dict[str, Way], State]:
    """Return the three ways by name, and the live rollout weights that they all write."""
    train, rollout = placements(dist.get_world_size(), model.table.layers)
    live, _ = build_rollout(model, rollout, rank)
    parallel_state.initialize_model_parallel(TP, PP, expert_model_parallel_size=EP)
    source = model.train_state(train, rank)
    mindspeed = nn.Module()
    mindspeed.named_parameters = lambda: iter(source.items())
    planned = resharder_for(hf_config, mindspeed, live, train, rollout, dist.group.WORLD, bucket_bytes)
    module = TrainingModule(model.weights, model.shape, train, rank)
    return {
        "planned": Way(planned.run),
        "verl": Way(VerlPath(module, hf_config, train, live).run),
        "published": Way(PublishedPath(source, model.shape, train, rollout, live).run),
    }, rollout_tensors(live)


def check_equal(found: dict[str, Way], target: State) -> None:
    """Check that every way gives every weight the same bytes. Raises RuntimeError for the first that does not."""
    expected = State()
    for name, way in found.items():
        for tensor in target.values():
            tensor.data.fill_(torch.nan)
        way.measure()
        if not expected:
            expected = {name: tensor.data.cpu().clone() for name, tensor in target.items()}
        if different := differing(target, expected):
            raise RuntimeError(f"the way {name!r} computes another {different[0]} than the first way")
        for values in way.results.values():
            values.clear()


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    request = json.loads((folder / "request.json").read_text())
    model, hf_config = Model(folder, 0), AutoConfig.from_pretrained(folder)
    found, target = ways(model, hf_config, request["bucket_bytes"], rank)
    weights = sum(tensor.numel() * tensor.itemsize for tensor in model.weights.values())
    check_equal(found, target)
    for number in range(request["repeats"]):
        order = list(found.values())
        for way in order[number % len(order) :] + order[: number % len(order)]:
            way.measure()
    if rank == 0:
        results = {name: way.results for name, way in found.items()}
        (folder / "measured.json").write_text(json.dumps({"model_bytes": weights, "ways": results}))
    dist.barrier()
