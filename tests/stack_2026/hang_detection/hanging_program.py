"""Run three iterations of two collectives in two groups on three emulated dies, with a hang that `way.txt` names.

`main(folder)` returns if nothing hangs. Otherwise a thread ends the process once all files of calls in the folder are
those of the hang: `CALLS_IN` has the number of calls that each rank has made by then, and of those not finished.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from post_training.hang_detection.calls import CALLS, CallsError, CallsOfStalledRank, read_calls
from post_training.hang_detection.signs import process_signs, start_sending

WORLD, CULPRIT = 3, 1
SEEN = "seen"
"""The folder that keeps the calls of the hang; a rank that ends may remove them from the run's folder."""
CALLS_IN = {
    # A rank skips a collective, and its next one in the group, of another kind, meets the others' skipped one.
    "skips": {0: (6, 1), 1: (6, 1), 2: (6, 1)},
    # A rank skips a collective, and waits in the other group.
    "skips alike": {0: (5, 1), 1: (5, 1), 2: (5, 1)},
    "swaps": {0: (7, 1), 1: (7, 1), 2: (7, 1)},
    "computes": {0: (5, 1), 1: (4, 0), 2: (5, 1)},
    "stops": {0: (5, 1), 2: (5, 1)},
}
_SEND_S, _AFTER_S, _LAST_ROUND = 0.1, 0.5, 2


def computes_for_ever() -> None:
    while True:
        time.sleep(0.01)


def wait_for_no_file(folder: Path, rank: int) -> None:
    """Wait until a heartbeat with progress has removed the rank's file of calls."""
    while (folder / CALLS / f"{rank}.json").exists():
        time.sleep(_SEND_S)


def rounds(folder: Path, way: str, culprit: bool, first: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
    """Make three iterations of the collectives, and one with the groups in another order."""
    tensor, gathered = torch.ones(4, device="npu"), torch.empty(4 * WORLD, device="npu")
    for number in range(3):
        last = culprit and number == _LAST_ROUND
        if last and way == "computes":
            computes_for_ever()
        if last and way == "stops":
            process_signs().progress()
            wait_for_no_file(folder, CULPRIT)
            os.kill(os.getpid(), signal.SIGSTOP)
            computes_for_ever()
        if not (last and way == "skips alike"):
            dist.all_reduce(tensor, group=first)
            torch.npu.synchronize()
        if not (last and way == "skips"):
            dist.all_gather_into_tensor(gathered, tensor, group=second)
            torch.npu.synchronize()
        process_signs().progress()
    if way == "swaps" and culprit:
        first, second = second, first
    if way != "skips":
        dist.all_reduce(tensor, group=first)
        torch.npu.synchronize()
    dist.all_reduce(tensor, group=second)
    torch.npu.synchronize()


def is_hung(folder: Path, way: str) -> bool:
    try:
        written = read_calls(folder)
    except CallsError:  # another rank has just removed its file
        return False
    found = {
        rank: (len(own.calls), sum(call.finished_ns is None for call in own.calls)) for rank, own in written.items()
    }
    return found == CALLS_IN[way]


def main(folder: Path) -> None:
    rank, way = int(os.environ["RANK"]), (folder / "way.txt").read_text()
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=600))
    groups = [dist.new_group(group_desc=name) for name in ("first", "second")]
    start_sending(str(rank), _SEND_S, CallsOfStalledRank(lambda *_: None, rank, folder, _AFTER_S))

    def end_when_hung() -> None:
        while not (folder / "over").exists():
            if is_hung(folder, way):
                for own in read_calls(folder).values():
                    own.write(folder / SEEN)
                (folder / "over").touch()
            time.sleep(_SEND_S)
        if way == "stops":
            os.kill(int((folder / "culprit").read_text()), signal.SIGCONT)
        # If this rank ended sooner, the others would miss it in the collective.
        (folder / f"ends.{rank}").touch()
        while len(list(folder.glob("ends.*"))) < WORLD:
            time.sleep(_SEND_S / 10)
        os._exit(0)

    if rank == CULPRIT:
        (folder / "culprit").write_text(str(os.getpid()))
    if way in CALLS_IN:
        threading.Thread(target=end_when_hung, daemon=True).start()
    try:
        rounds(folder, way, rank == CULPRIT, *groups)
    except RuntimeError:  # another rank has already exited
        if not (folder / "over").exists():
            raise
    if way in CALLS_IN:
        computes_for_ever()
    process_signs().progress()
    wait_for_no_file(folder, rank)
    dist.destroy_process_group()
