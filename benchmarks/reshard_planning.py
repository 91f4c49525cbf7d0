#!/usr/bin/env python3
"""Seconds and memory that one rank takes to plan a reshard of a published model over hundreds of dies.

Layouts are those of the real models; there are no weights and no other ranks.
Their messages are made beforehand and not counted. Each case runs in a fresh
process, so that memory is its own.

Example:
    python benchmarks/reshard_planning.py --case deepseek-256
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.layouts.layout import RolloutPlacement, Shard, Table, TrainPlacement, whole_slice  # noqa: E402
from post_training.layouts.regions import Regions, SideRegions, regions_of, rollout_regions  # noqa: E402
from post_training.plan.placement_text import parse_model  # noqa: E402
from post_training.reshard.rank_plan import make_rank_plan  # noqa: E402
from post_training.reshard.schedule import buckets_of_traffic, schedule, shard_origins  # noqa: E402

BUCKET = 1 << 30
ITEMSIZE = 2
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_STAGES = (7, 7, 8, 8, 8, 8, 8, 7)


@dataclass(frozen=True)
class Case:
    """A model, its training ranks and its rollout.

    Attributes:
        train: placement of Megatron's ranks, or how many ranks shard with FSDP2.
        copies: with FSDP2, how many ranks own each shard.
        separate: whether training and rollout have dies of their own.
    """

    model: str
    train: TrainPlacement | int
    rollout: RolloutPlacement
    copies: int = 1
    separate: bool = False

    @property
    def trainers(self) -> int:
        return self.train if isinstance(self.train, int) else self.train.world_size

    @property
    def ranks(self) -> int:
        return self.trainers + self.rollout.world_size if self.separate else self.trainers


DEEPSEEK, QWEN = "deepseek-v3", "qwen3-235b-a22b"
CASES = {
    "deepseek-256": Case(DEEPSEEK, TrainPlacement(4, 8, 8, 8, _STAGES), RolloutPlacement(2, 128, 256)),
    "deepseek-1024": Case(DEEPSEEK, TrainPlacement(4, 8, 8, 32, _STAGES), RolloutPlacement(2, 128, 256, 4)),
    "deepseek-512+512": Case(
        DEEPSEEK, TrainPlacement(4, 8, 8, 16, _STAGES), RolloutPlacement(2, 128, 256, 2), separate=True
    ),
    "qwen-1024": Case(QWEN, TrainPlacement(4, 8, 8, 32, (12,) * 7 + (10,)), RolloutPlacement(4, 32, 128, 8)),
    "qwen-fsdp2-256": Case(QWEN, 256, RolloutPlacement(4, 32, 128, 2)),
    "qwen-fsdp2-256-copies": Case(QWEN, 256, RolloutPlacement(4, 32, 128, 2), copies=8),
    "qwen-fsdp2-1024": Case(QWEN, 1024, RolloutPlacement(4, 32, 128, 8)),
}


@dataclass(frozen=True)
class PlanningResult:
    """CPU seconds of one rank, and the memory that it takes in addition, in MB.

    Attributes:
        layouts: seconds to compute the shards that all ranks own and serve.
        plan: seconds to assign senders and receivers.
        schedule: seconds to cut this rank's part into buckets.
        transfers: number of this rank's transfers.
        buckets: number of buckets of one update.
    """

    ranks: int
    layouts: float
    plan: float
    schedule: float
    memory: float
    transfers: int
    buckets: int

    @property
    def seconds(self) -> float:
        return self.layouts + self.plan + self.schedule


def held(case: Case, table: Table) -> Iterator[list[Shard]]:
    """Yield the shards that each training rank owns."""
    if isinstance(case.train, TrainPlacement):
        yield from (table.megatron(case.train, rank) for rank in range(case.trainers))
        return
    parts = case.train // case.copies
    for rank in range(case.train):
        yield list(sharded(table, parts, rank % parts))


def sharded(table: Table, parts: int, at: int) -> Iterator[Shard]:
    """Yield one FSDP2 rank's shards: tensors are cut by rows as `torch.chunk` does, packed experts by expert number."""
    experts = 1 + max((int(found[1]) for found in map(_EXPERT.search, table.shapes) if found), default=-1)
    for name, shape in table.shapes.items():
        expert = _EXPERT.search(name)
        first, last = chunk(experts if expert else shape[0], parts, at)
        if expert:
            if first <= int(expert[1]) < last:
                yield Shard(name, whole_slice(shape), name)
        elif first < last:
            yield Shard(name, ((first, last), *whole_slice(shape[1:])), name)


def chunk(rows: int, parts: int, at: int) -> tuple[int, int]:
    """Return the rows of one part; parts are equal, except that the last may be smaller or empty."""
    size = -(-rows // parts)
    return min(at * size, rows), min((at + 1) * size, rows)


def measure(name: str) -> PlanningResult:
    """Plan as the training rank in the middle."""
    case = CASES[name]
    table = parse_model(case.model)
    names, rank = tuple(table.shapes), case.trainers // 2
    own, gathered = make_inputs(case, table, rank, names)
    before = peak_bytes()
    begin = time.process_time()
    place = rank if rank < case.rollout.world_size and not case.separate else None
    serves = [] if place is None else table.vllm_ascend(case.rollout, place)
    train, rollout = gathered, rollout_regions(table, case.rollout)
    if case.separate:
        nothing = regions_of((), ())
        train, rollout = [*train, *[nothing] * len(rollout)], [*[nothing] * len(train), *rollout]
    sides = SideRegions(names, train, own), SideRegions(names, rollout, serves)
    for side in sides:
        side.first_held(rank)
    known = time.process_time()
    plan = make_rank_plan(train, rollout, names, lambda tensor: ITEMSIZE, rank)
    planned = time.process_time()
    stays = np.diag(np.diag(plan.traffic))
    counts = [buckets_of_traffic(each, plan.widest_row, BUCKET) for each in (stays, plan.traffic - stays)]
    origins = shard_origins(own), shard_origins(serves)
    for leg, count in zip((plan.local, plan.remote), counts, strict=True):
        schedule(leg, case.ranks, rank, count, origins)
    end = time.process_time()
    memory = (peak_bytes() - before) / 1e6
    transfers = len(plan.local) + len(plan.remote)
    return PlanningResult(case.ranks, known - begin, planned - known, end - planned, memory, transfers, counts[1])


def make_inputs(case: Case, table: Table, rank: int, names: Sequence[str]) -> tuple[list[Shard], list[Regions]]:
    """Return the rank's own layout, and the layouts that all ranks report."""
    own: list[Shard] = []
    gathered = []
    for number, shards in enumerate(held(case, table)):
        gathered.append(regions_of(shards, names))
        own = shards if number == rank else own
    return own, gathered


def peak_bytes() -> int:
    """Return the peak memory of this process. `getrusage` would count the process that started it too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def report(results: dict[str, PlanningResult]) -> str:
    """Return one line per case."""
    columns: dict[str, Callable[[PlanningResult], str]] = {
        "ranks": lambda each: str(each.ranks),
        "layouts, s": lambda each: f"{each.layouts:.2f}",
        "plan, s": lambda each: f"{each.plan:.2f}",
        "buckets, s": lambda each: f"{each.schedule:.2f}",
        "together, s": lambda each: f"{each.seconds:.2f}",
        "memory, MB": lambda each: f"{each.memory:.0f}",
        "transfers": lambda each: str(each.transfers),
        "buckets": lambda each: str(each.buckets),
    }
    width = max(map(len, results))
    lines = [" " * width + "".join(f"{head:>13}" for head in columns)]
    lines += [
        f"{name:<{width}}" + "".join(f"{show(each):>13}" for show in columns.values()) for name, each in results.items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    case = f"a case to measure, repeatable: {', '.join(CASES)} (default: all)"
    parser.add_argument("--case", choices=CASES, action="append", metavar="NAME", help=case)
    options = parser.parse_args(arguments)
    results: dict[str, PlanningResult] = {}
    for name in options.case or CASES:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            results[name] = fresh.apply(measure, (name,))
    print(report(results))
    write_results(options.json, {name: asdict(each) | {"seconds": each.seconds} for name, each in results.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
