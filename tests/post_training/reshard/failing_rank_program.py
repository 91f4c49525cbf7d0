"""Make one of four ranks fail during a reshard, in the way named in the folder's `way.txt`.

`main(folder)` writes the error that each surviving rank received to `<rank>.json`.
"""

import datetime
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from post_training.reshard import exchange, resharder
from post_training.reshard.failure import ReshardError
from post_training.reshard.generation import WeightsGeneration, WeightsNotWholeError
from tests.post_training.reshard.exchange_program import Case

SEED, BUCKET = 5, 20_000
CULPRIT = 2
TIMEOUT = 8.0
"""torch_npu's watchdog timeout in seconds; HCCL's is lower, as in the launchers' environment files."""


def at_second_pack(act: Callable[[exchange.Side, exchange.Direction], None]) -> Callable:
    """Return a `pack` that runs `act` in its second bucket."""
    upstream, calls = exchange.pack, []

    def packing(side: exchange.Side, direction: exchange.Direction, buffer: torch.Tensor) -> None:
        calls.append(direction)
        if len(calls) == 2:
            act(side, direction)
        upstream(side, direction, buffer)

    return packing


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_weight(side: exchange.Side, direction: exchange.Direction) -> None:
    """Replace a weight by one of another shape, so that packing it raises."""
    local = side.shards[next(iter(direction.chunks)).shard].local
    side.tensors[local] = torch.zeros(1, device="npu")


def told(action: Callable[[], object]) -> dict:
    start = time.monotonic()
    try:
        action()
    except (ReshardError, WeightsNotWholeError) as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"type": None, "text": "", "seconds": time.monotonic() - start}


def run(case: Case, generation: WeightsGeneration) -> None:
    with generation.writing():
        case.resharder.run()


def main(folder: Path) -> None:
    rank, way = int(os.environ["RANK"]), (folder / "way.txt").read_text()
    if rank == CULPRIT and (child := os.fork()):
        os.waitpid(child, 0)  # the harness must not see a killed rank and end the others before they notice
        return
    os.environ["HCCL_EXEC_TIMEOUT"] = str(int(TIMEOUT) // 2)
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", timeout=datetime.timedelta(seconds=TIMEOUT))
    resharder.MEMBERSHIP_CHECK_S = 5.0  # on a busy machine the survivors notice up to three seconds apart
    case, generation = Case(SEED, torch.bfloat16, BUCKET), WeightsGeneration()
    run(case, generation)
    found = {"before": told(generation.require_whole) | {"differing": case.differing()}}
    kept, pack = dict(case.source), exchange.pack
    if rank == CULPRIT:
        if way == "does not come":
            time.sleep(TIMEOUT * 2)
            os._exit(0)
        if way != "nothing":
            exchange.pack = at_second_pack(die if way == "dies" else lose_a_weight)
    found["reshard"] = told(lambda: run(case, generation))
    found["generate"] = told(generation.require_whole)
    if way in ("nothing", "raises"):
        exchange.pack = pack
        case.source.update(kept)
        run(case, generation)
        found["after"] = told(generation.require_whole) | {"differing": case.differing()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if way not in ("nothing", "raises") and rank == 0:
        time.sleep(8)  # it serves the store, which the others may still query
    os._exit(0)
