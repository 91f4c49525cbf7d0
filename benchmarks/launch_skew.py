"""Measure the delay between the first and the last worker's start when verl hands a batch to all of them.

Example:
    python benchmarks/launch_skew.py --actors 32 --samples 512 --tokens 4096

verl's own dispatch and worker group run with Ray's actors on this machine, which only report when they were called.
Tensor- and pipeline-parallel ranks, `--sharing` of them, take the same part of the batch. In turns, the batch is sent
as by the pinned verl, where each worker's part is serialized separately; with `shared_chunks`, where each distinct part
enters Ray's store once; as by verl 0.4.0, which does that in its dispatch; and with `sample_handles`, where ids and
lengths replace the tokens, which stay with the workers. The batch is the reference policy's in verl: three tensors of
whole sequences, their prompts, their responses and a mask of these, in int64. One machine has no network, and actors
that wait for a processor are part of the skew, so compare the ratios, and the bytes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
import torch  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.single_controller.base.decorator import dispatch_megatron_compute_data_proto  # noqa: E402
from verl.single_controller.base.megatron.worker_group import MegatronWorkerGroup  # noqa: E402
from verl.single_controller.ray.base import RayWorkerGroup  # noqa: E402

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.arguments import whole  # noqa: E402
from rehearsal.prefork import start_template  # noqa: E402
from verl_patches.features.measure import serialized  # noqa: E402
from verl_patches.features.sample_handles.handles import ID, LENGTHS, DriverOfHandles  # noqa: E402
from verl_patches.protocol import getstate  # noqa: E402
from verl_patches.single_controller.ray.base import execute_all_async  # noqa: E402

WAYS = ("pinned", "shared chunks", "verl 0.4.0", "sample handles")
_PUTS_PARTS = WAYS[2:]


@dataclass(frozen=True)
class Turn:
    """The measurements of one turn.

    Attributes:
        skew_s: seconds from the first worker's start to the last's.
        driver_s: seconds until all calls were handed out.
        bytes: size of the tensors that the driver serialized.
    """

    way: str
    skew_s: float
    driver_s: float
    bytes: int


class Worker:
    """Reports when it was called, and with how many samples."""

    def work(self, data: DataProto) -> tuple[float, int]:
        return time.time(), len(data)


class SharingWorkerGroup(RayWorkerGroup, MegatronWorkerGroup):
    """verl's worker group over existing actors; neighbouring ranks share a part of the batch."""

    def __init__(self, workers: list[Any], sharing: int):
        self._workers, self._sharing, self.fused_worker_used = workers, sharing, False

    @property
    def world_size(self) -> int:
        return len(self._workers)

    @property
    def dp_size(self) -> int:
        return len(self._workers) // self._sharing

    def get_megatron_rank_info(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(dp_rank=rank // self._sharing)


def batch_of(samples: int, tokens: int) -> DataProto:
    """Return the batch that verl gives to the reference policy; a quarter of the tokens are prompts."""
    prompt = tokens // 4
    widths = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), tokens)
    widths |= {"prompts": prompt, "responses": tokens - prompt, "response_mask": tokens - prompt}
    return DataProto.from_dict({name: torch.ones(samples, width, dtype=torch.int64) for name, width in widths.items()})


def with_ids(batch: DataProto) -> DataProto:
    """Return the batch as the driver holds it once its samples have ids."""
    samples = len(batch)
    ids = {ID: torch.arange(samples), LENGTHS: torch.ones(samples, 2, dtype=torch.int32)}
    return DataProto.from_dict({**batch.batch, **ids})


def take_turn(group: SharingWorkerGroup, batch: DataProto, way: str) -> Turn:
    """Hand the batch to all workers in one of WAYS.

    The only difference between the installed verl 0.4.0 and the pinned commit is that its dispatch puts parts of
    training batches into the store.
    """
    upstream: Callable[..., list[Any]] = RayWorkerGroup.execute_all_async
    with_handles = with_ids(batch)
    serialized.take()
    begin = time.perf_counter()
    if way == "sample handles":
        batch = DriverOfHandles(ray.put, lambda: 1).handles(with_handles)
    with nullcontext() if way in _PUTS_PARTS else patch.object(ray, "put", lambda part: part):
        arguments, named = dispatch_megatron_compute_data_proto(group, batch)
    if way == "shared chunks":
        calls = execute_all_async(upstream, group, "work", *arguments, **named)
    else:
        calls = upstream(group, "work", *arguments, **named)
    driver = time.perf_counter() - begin
    answers = ray.get(calls)
    starts = [start for start, _ in answers]
    assert sum(samples for _, samples in answers) == len(batch) * group._sharing, "a worker got the wrong part"
    return Turn(way, max(starts) - min(starts), driver, serialized.take())


@contextmanager
def ray_of(actors: int, batch_bytes: int, sharing: int) -> Iterator[list[Any]]:
    """Start an isolated local Ray; its actors are forked from one process that has imported what they need."""
    template = start_template(("torch", "verl.protocol"))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    environment = {"py_executable": template.py_executable, "env_vars": {"PYTHONPATH": str(ROOT)}}
    store = max(512 << 20, 3 * batch_bytes * sharing)
    try:
        ray.init(
            address="local",
            num_cpus=actors,
            include_dashboard=False,
            object_store_memory=store,
            runtime_env=environment,
            log_to_driver=False,
            logging_level="error",
        )
        worker = ray.remote(num_cpus=1)(Worker)
        yield [worker.remote() for _ in range(actors)]
    finally:
        ray.shutdown()
        template.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--actors", type=whole(2), default=32, help="workers (default: %(default)s)")
    parser.add_argument("--sharing", type=whole(1), default=4, help="that take the same part (default: %(default)s)")
    parser.add_argument("--samples", type=whole(1), default=512, help="of the batch (default: %(default)s)")
    parser.add_argument("--tokens", type=whole(4), default=4096, help="of a sample (default: %(default)s)")
    parser.add_argument("--turns", type=whole(1), default=5, help="of each way (default: %(default)s)")
    options = parser.parse_args()
    if options.actors % options.sharing or options.samples % (options.actors // options.sharing):
        parser.error(
            f"--samples={options.samples} cannot be divided among {options.actors} actors, {options.sharing} alike"
        )
    batch = batch_of(options.samples, options.tokens)
    state = DataProto.__getstate__
    DataProto.__getstate__ = lambda self: getstate(state, self)  # counts bytes
    size = sum(tensor.nbytes for tensor in batch.batch.values())
    with ray_of(options.actors, size, options.sharing) as workers:
        group = SharingWorkerGroup(workers, options.sharing)
        take_turn(group, batch_of(options.actors, 4), WAYS[0])  # until every actor is there
        turns = [take_turn(group, batch, way) for _ in range(options.turns) for way in WAYS]
    report(turns, options.samples)
    write_results(options.json, [asdict(turn) for turn in turns])


def report(turns: list[Turn], samples: int) -> None:
    """Print the medians of each way's turns, and the ratios of this project's turns to neighbouring pinned ones."""
    print(f"{'way':<15}{'skew s':>9}{'driver s':>10}{'MB':>9}{'KB a sample':>13}")
    by_way = {way: [turn for turn in turns if turn.way == way] for way in WAYS}
    for way, found in by_way.items():
        skew, driver = (statistics.median(getattr(turn, name) for turn in found) for name in ("skew_s", "driver_s"))
        print(
            f"{way:<15}{skew:>9.3f}{driver:>10.3f}{found[0].bytes / 1e6:>9.1f}{found[0].bytes / samples / 1e3:>13.2f}"
        )
    for way in ("shared chunks", "sample handles"):
        pairs = list(zip(by_way[WAYS[0]], by_way[way], strict=True))
        ratio = statistics.median(ours.skew_s / pinned.skew_s for pinned, ours in pairs)
        print(f"skew with {way}: {ratio:.2f} of the pinned way's, the median of {len(pairs)} pairs of turns")


if __name__ == "__main__":
    main()
