"""Streams with threads of their own as a program sees them; `test_streams` starts it with NPU_EMULATOR_STREAM_SEED.

    python -m tests.npu_emulator.streams_program RESULTS

RESULTS becomes a JSON object. Each hazard is tried without and with the call that orders it; the result is how often
the value was the right one, of TRIALS times.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch_npu  # noqa: F401

TRIALS = 16
SIZE = 1 << 16


def filled(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.float32, device="npu")


def wait_between_streams(is_ordered: bool) -> bool:
    """A side stream reads what the current stream writes."""
    side, source = torch.npu.Stream(), filled(0)
    torch.npu.synchronize()
    source.add_(1)
    with torch.npu.stream(side):
        if is_ordered:
            side.wait_stream(torch.npu.default_stream())
        read = source + 1
    side.synchronize()
    value = read.cpu()
    torch.npu.synchronize()
    return bool((value == 2).all())


def wait_for_event(is_ordered: bool) -> bool:
    """The current stream reads what a side stream writes, and its event orders them."""
    side, source, event = torch.npu.Stream(), filled(0), torch.npu.Event()
    torch.npu.synchronize()
    with torch.npu.stream(side):
        source.fill_(5)
        event.record(side)
    if is_ordered:
        event.wait(torch.npu.default_stream())
    value = (source * 1).cpu()
    torch.npu.synchronize()
    return bool((value == 5).all())


def synchronize_before_host_reads(is_ordered: bool) -> bool:
    """The host reads pinned memory that a copy writes."""
    host, source = torch.zeros(SIZE).pin_memory(), filled(0)
    torch.npu.synchronize()
    host.copy_(source.add_(3), non_blocking=True)
    if is_ordered:
        torch.npu.synchronize()
    value = host.clone()
    torch.npu.synchronize()
    return bool((value == 3).all())


def synchronize_before_host_writes(is_ordered: bool) -> bool:
    """The host writes pinned memory that a copy reads."""
    host, target = torch.ones(SIZE).pin_memory(), filled(0)
    torch.npu.synchronize()
    target.copy_(host, non_blocking=True)
    if is_ordered:
        torch.npu.synchronize()
    host.fill_(9)
    value = target.cpu()
    return bool((value == 1).all())


def record_stream(is_ordered: bool) -> bool:
    """Memory that a side stream still reads is freed, and used again on the stream that it was allocated on."""
    side, source = torch.npu.Stream(), filled(4)
    torch.npu.synchronize()
    with torch.npu.stream(side):
        read = source + 1
    if is_ordered:
        source.record_stream(side)
    del source
    filled(70)
    torch.npu.default_stream().synchronize()
    side.synchronize()
    return bool((read.cpu() == 5).all())


HAZARDS: tuple[Callable[[bool], bool], ...] = (
    wait_between_streams,
    wait_for_event,
    synchronize_before_host_reads,
    synchronize_before_host_writes,
    record_stream,
)


def shapes_that_depend_on_values() -> bool:
    """The host asks for them while the work is in progress elsewhere."""
    values = torch.tensor([3.0, 0, 5, 0, 7], device="npu")
    return values.nonzero().flatten().tolist() == [0, 2, 4] and values[values > 4].tolist() == [5, 7]


def time_between_events() -> bool:
    first, second = (torch.npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    filled(1)
    second.record()
    second.synchronize()
    return first.query() and second.query() and first.elapsed_time(second) > 0


def replays() -> bool:
    """A captured graph reads earlier writes, and later work reads its results."""
    x, graph = filled(1), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * 2
    seen = []
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        seen.append((y + 1)[0].item())
    return seen == [7, 9]


def failures() -> list[str]:
    """Return the errors when the host waits for a kernel that fails, and when it waits once more."""
    said = []
    for attempt in range(2):
        try:
            if attempt == 0:
                filled(0)[:4].index_select(0, torch.tensor([9], device="npu"))
            torch.npu.synchronize()
        except (RuntimeError, IndexError) as error:
            said.append(str(error))
    return said


def main() -> None:
    answers: dict[str, object] = {
        hazard.__name__: {
            name: sum(hazard(is_ordered) for _ in range(TRIALS))
            for name, is_ordered in (("without", False), ("with", True))
        }
        for hazard in HAZARDS
    }
    answers |= {check.__name__: check() for check in (shapes_that_depend_on_values, time_between_events, replays)}
    answers["failures"] = failures()  # the device is of no use afterwards
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
