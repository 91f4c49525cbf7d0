"""The self-test of dies: operations on which training relies, each compared with its expected result.

`scripts.health_checks.device_test` runs it on dies 0 and 1, one rank each, and limits its time. Every line of stdout is
a JSON object: `{"begins": name}` before a check, then `{"check": name, "state": state, "said": text}`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from post_training.finite_steps.finite import all_finite

READY, MAXIMA, FINITE, LARGE, EVENTS, EXCHANGE = (
    "start", "NaN in maxima", "non-finite check", "large tensors", "event order", "empty all-to-all",
)  # fmt: skip
OK, BAD, LEFT_OUT = "ok", "bad", "left out"
RANKS = 2
LARGE_ELEMENTS = 2**31 + 2**16 + 3
"""More than a signed 32-bit integer can count, and not a multiple of a kernel's block."""
_SIZES = (1, 4097, 70_001)
_TURNS = 32
# Elements that rank 0 sends to ranks 0 and 1, and those that rank 1 sends.
_SENT = ([[0, 3], [2, 0]], [[0, 0], [5, 0]], [[1, 2], [0, 0]], [[0, 0], [0, 0]])

Result = tuple[str, str]


def nan_in_maxima() -> Result:
    """Check that max and min of tensors with one NaN, at the beginning, in the middle and at the end, are NaN."""
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "max()": torch.Tensor.max,
        "min()": torch.Tensor.min,
        "amax()": torch.Tensor.amax,
        "amin()": torch.Tensor.amin,
        "max(dim)": lambda values: values.view(1, -1).max(dim=1).values,
    }
    for dtype, size, place in _spoilt_places():
        values = torch.zeros(size, dtype=dtype, device="npu")
        values[place] = float("nan")
        for name, call in calls.items():
            found = call(values).item()
            if found == found:
                return BAD, f"{name} of {size} elements of {dtype} with NaN at {place} is {found}"
    return OK, "max and min of a tensor with NaN are NaN"


def finite_check() -> Result:
    """Check the reduction by which an update with non-finite gradients is skipped."""
    for dtype, size, place in _spoilt_places():
        largest = torch.finfo(dtype).max
        values = torch.full((size,), largest, dtype=dtype, device="npu")
        values[place] = -largest
        if not bool(all_finite(values)):
            return BAD, f"{size} elements of {dtype} between -{largest} and {largest} count as not finite"
        for bad in (float("nan"), float("inf"), float("-inf")):
            values[place] = bad
            if bool(all_finite(values)):
                return BAD, f"{size} elements of {dtype} with {bad} at {place} count as finite"
    return OK, "all inf and NaN are found"


def _spoilt_places() -> Iterator[tuple[torch.dtype, int, int]]:
    for dtype in (torch.float32, torch.bfloat16):
        for size in _SIZES:
            yield from ((dtype, size, place) for place in sorted({0, size // 2, size - 1}))


def large_tensors(elements: int | None) -> Result:
    """Check fill, copy and sum of more elements than 32 bits can count, if the die has memory for them.

    `elements` of None means `LARGE_ELEMENTS`, left out on an emulated die, whose memory is this host's.
    """
    if elements is None and _emulated():
        return LEFT_OUT, "an emulated die keeps its memory on this host"
    count = elements or LARGE_ELEMENTS
    free, _ = torch.npu.mem_get_info()
    if free < 3 * count:
        return LEFT_OUT, f"{3 * count / 1e9:.1f} GB are needed, but {free / 1e9:.1f} GB are free"
    # Positions where a counter of 31 or of 32 bits ends, and the end.
    marks = sorted({0, count // 2, min(2**31 - 1, count - 2), min(2**31, count - 2), count - 1})
    # Neither holds 0 or 1 before, so that elements left out by a call are noticed.
    values, copied = (torch.full((count,), 2, dtype=torch.int8, device="npu") for _ in range(2))
    values.zero_()
    values[marks] = 1
    copied.copy_(values)
    for name, tensor, wanted in (("zero_()", values, 0), ("copy_()", copied, 1)):
        if name == "zero_()":
            tensor.zero_()
        found = [int(tensor[mark]) for mark in marks]
        if found != [wanted] * len(marks):
            return BAD, f"after {name} of {count} elements those at {marks} are {found}, but must be {wanted}"
    said = f"fills and copies of {count} elements are complete"
    # An integer sum may need a copy in 64 bits.
    if torch.npu.mem_get_info()[0] < 10 * count:
        return OK, f"{said}; sums need {10 * count / 1e9:.1f} GB more and are skipped"
    total = int(copied.sum(dtype=torch.int64))
    if total != len(marks):
        return BAD, f"the sum of {count} elements, of which {len(marks)} are 1, is {total}"
    return OK, f"{said}, and so are sums"


def event_order() -> Result:
    """Check many times that a stream that waits for an event reads the values written before it by another stream."""
    writing, reading = torch.npu.Stream(), torch.npu.Stream()
    busy, value = torch.ones(256, 256, device="npu"), torch.zeros(1 << 16, device="npu")
    read = torch.empty_like(value)
    torch.npu.synchronize()
    for turn in range(1, _TURNS + 1):
        with torch.npu.stream(writing):
            for _ in range(4):  # so that a read without waiting would be too early
                busy = torch.mm(busy, busy).clamp(max=1.0)
            value.fill_(turn)
            written = torch.npu.Event()
            written.record(writing)
        with torch.npu.stream(reading):
            reading.wait_event(written)
            read.copy_(value)
            done = torch.npu.Event()
            done.record(reading)
        writing.wait_event(done)
        reading.synchronize()
        wrong = int((read.cpu() != turn).sum())
        if wrong:
            return (
                BAD,
                f"{wrong} of {read.numel()} elements were read before their event, turn {turn}",
            )
    return OK, "a stream that waits for an event reads what was written before it"


def empty_all_to_all(rank: int, store: Path) -> Result:
    """Check all-to-alls in which ranks send nothing to some ranks, to all of them, or no rank sends anything."""
    if torch.npu.device_count() < RANKS:
        return LEFT_OUT, f"it needs {RANKS} dies, but there is {torch.npu.device_count()}"
    problem = ""
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for sent in _SENT:
        parts = [_message(rank, target, sent[rank][target]) for target in range(RANKS)]
        wanted = torch.cat([_message(origin, rank, sent[origin][rank]) for origin in range(RANKS)])
        incoming = torch.full_like(wanted, -1).npu()
        received = [sent[origin][rank] for origin in range(RANKS)]
        dist.all_to_all_single(incoming, torch.cat(parts).npu(), received, sent[rank])
        if not torch.equal(incoming.cpu(), wanted):  # the other rank goes on, and waits for this one
            problem = problem or f"rank {rank} received {incoming.tolist()}, but must have {wanted.tolist()}"
    _wait_for_all(rank, store)
    return (BAD, problem) if problem else (OK, f"between {RANKS} dies, with empty parts")


def _wait_for_all(rank: int, store: Path) -> None:
    """Return when every rank is here: one that ends early would free memory from which another still reads."""
    here = [store.with_name(f"{store.name}.{each}.done") for each in range(RANKS)]
    here[rank].touch()
    while not all(file.exists() for file in here):
        time.sleep(0.01)


def _message(origin: int, target: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32) + 1000 * origin + 100 * target


def _emulated() -> bool:
    from scripts.health_checks.node import emulated

    return emulated()


def _tell(**line: str) -> None:
    # Written to the descriptor itself: libraries print to stdout as well, and a check is announced before it may hang.
    os.write(1, (json.dumps(line) + "\n").encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks of a rank and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="file through which the ranks find each other")
    parser.add_argument("--large-elements", type=int, help="elements of the large tensors")
    given = parser.parse_args(arguments)
    checks: dict[str, Callable[[], Result]] = {EXCHANGE: lambda: empty_all_to_all(given.rank, given.store)}
    if given.rank == 0:
        own = {MAXIMA: nan_in_maxima, FINITE: finite_check, LARGE: lambda: large_tensors(given.large_elements)}
        checks = own | {EVENTS: event_order} | checks
    _tell(begins=READY)
    if given.rank < torch.npu.device_count():
        torch.npu.set_device(given.rank)
        torch.ones(1).npu().add_(1).cpu()
    elif given.rank:
        return 0
    _tell(check=READY, state=OK, said="")
    for name, check in checks.items():
        _tell(begins=name)
        state, said = check()
        _tell(check=name, state=state, said=said)
    return 0


if __name__ == "__main__":
    # End at once: an ordinary exit would wait for threads of the process group, in which the other rank may still be.
    os._exit(main())
