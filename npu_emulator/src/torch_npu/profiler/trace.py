"""Files of a recording, in the form in which Ascend PyTorch Profiler leaves them.

Host and device share one clock, and a kernel computes inside the call that asked for it. Times in files are in
microseconds.
"""

import csv
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_emulator import _C

Kind = _C.EventKind
DEVICE_PROCESS = 1_000_000  # in the timeline, added to the number of a die; processes have smaller numbers
STEP_NAME = "ProfilerStep#"
CORE = "HOST_CPU"


@dataclass(frozen=True)
class Step:
    """One step as the schedule counts them, in nanoseconds."""

    number: int
    start: int
    end: int


class Recording:
    """Events between a start and a stop of the recorder."""

    def __init__(self, events: Iterable, activities: Iterable, metadata: dict[str, object]):
        kept = {Kind.ANNOTATION}
        names = {activity.name for activity in activities}
        kept |= {Kind.OPERATOR, Kind.BACKWARD} if "CPU" in names else set()
        kept |= {Kind.KERNEL, Kind.COLLECTIVE} if "NPU" in names else set()
        self.events = sorted((event for event in events if event.kind in kept), key=lambda event: event.start)
        self.metadata = metadata
        self.steps = [
            Step(int(event.name.removeprefix(STEP_NAME)), event.start, event.start + event.duration)
            for event in self.events
            if event.kind == Kind.ANNOTATION and event.name.startswith(STEP_NAME)
        ]

    def on_device(self) -> list:
        return [event for event in self.events if event.device >= 0]

    def on_host(self) -> list:
        return [event for event in self.events if event.kind in (Kind.OPERATOR, Kind.BACKWARD)]

    def step_of(self, event) -> int | str:
        """The step that an event began in, or nothing."""
        return next((step.number for step in self.steps if step.start <= event.start < step.end), "")


def chrome_trace(recording: Recording) -> list[dict]:
    """The timeline: calls by thread of the process, computation by die, and an arrow from one to the other."""
    process = os.getpid()
    devices = sorted({event.device for event in recording.on_device()})
    lanes = [
        _lane(process, "Python"),
        *(_lane(DEVICE_PROCESS + device, f"Ascend Hardware {device}") for device in devices),
    ]
    return lanes + [
        entry for number, event in enumerate(recording.events) for entry in _entries(event, number, process)
    ]


def _lane(process: int, name: str) -> dict:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _entries(event, number: int, process: int) -> Iterator[dict]:
    begin, duration = event.start / 1e3, event.duration / 1e3
    entry = {"ph": "X", "name": event.name, "ts": begin, "dur": duration}
    if event.device < 0:
        category = {Kind.OPERATOR: "cpu_op", Kind.BACKWARD: "cpu_op", Kind.ANNOTATION: "user_annotation"}[event.kind]
        arguments = {"Input Dims": event.shapes} if event.shapes else {}
        yield entry | {"cat": category, "pid": process, "tid": event.thread, "args": arguments}
        return
    die = DEVICE_PROCESS + event.device
    yield entry | {"cat": "kernel", "pid": die, "tid": 0, "args": {"Device Id": event.device, "Stream Id": 0}}
    arrow = {"name": "async_npu", "cat": "async_npu", "id": number, "ts": begin}
    yield arrow | {"ph": "s", "pid": process, "tid": event.thread}
    yield arrow | {"ph": "f", "bp": "e", "pid": die, "tid": 0}


def kernel_details(recording: Recording) -> Iterator[dict]:
    """Each computation of a die."""
    for event in recording.on_device():
        yield {
            "Step Id": recording.step_of(event),
            "Device_id": event.device,
            "Stream ID": 0,
            "Name": event.name,
            "Type": event.name.split("::")[-1],
            "Accelerator Core": "HCCL" if event.kind == Kind.COLLECTIVE else CORE,
            "Start Time(us)": f"{event.start / 1e3:.3f}",
            "Duration(us)": f"{event.duration / 1e3:.3f}",
            "Wait Time(us)": "0.000",
        }


def op_statistic(recording: Recording) -> Iterator[dict]:
    """Calls and times of a die by type of operator."""
    durations = defaultdict(list)
    for event in recording.on_device():
        durations[event.device, event.name.split("::")[-1]].append(event.duration / 1e3)
    everything = sum(map(sum, durations.values()))
    for (device, name), times in sorted(durations.items(), key=lambda item: -sum(item[1])):
        yield {
            "Device_id": device,
            "OP Type": name,
            "Core Type": CORE,
            "Count": len(times),
            "Total Time(us)": f"{sum(times):.3f}",
            "Min Time(us)": f"{min(times):.3f}",
            "Avg Time(us)": f"{sum(times) / len(times):.3f}",
            "Max Time(us)": f"{max(times):.3f}",
            "Ratio(%)": f"{100 * sum(times) / everything:.3f}" if everything else "",
        }


def operator_details(recording: Recording) -> Iterator[dict]:
    """Each call of an operator on the host; its own time is what calls inside it did not take."""
    inside, device_inside = defaultdict(int), defaultdict(int)
    device_self = defaultdict(int)
    open_calls: dict[int, list] = defaultdict(list)
    for event in recording.events:
        calls = open_calls[event.thread]
        while calls and calls[-1].start + calls[-1].duration <= event.start:
            calls.pop()
        if event.device >= 0:
            if calls:
                device_self[id(calls[-1])] += event.duration
            for call in calls:
                device_inside[id(call)] += event.duration
        elif event.kind != Kind.ANNOTATION:
            if calls:
                inside[id(calls[-1])] += event.duration
            calls.append(event)
    for event in recording.on_host():
        yield {
            "Name": event.name,
            "Input Shapes": ";".join(",".join(map(str, shape)) for shape in event.shapes),
            "Call Stack": "",
            "Host Self Duration(us)": f"{(event.duration - inside[id(event)]) / 1e3:.3f}",
            "Host Total Duration(us)": f"{event.duration / 1e3:.3f}",
            "Device Self Duration(us)": f"{device_self[id(event)] / 1e3:.3f}",
            "Device Total Duration(us)": f"{device_inside[id(event)] / 1e3:.3f}",
        }


def step_trace_time(recording: Recording) -> Iterator[dict]:
    """What each die did in each step. Nothing overlaps here: a collective is over when its call returns."""
    for device in sorted({event.device for event in recording.on_device()}):
        for step in recording.steps:
            times = {Kind.KERNEL: 0, Kind.COLLECTIVE: 0}
            for event in recording.on_device():
                if event.device == device and step.start <= event.start < step.end:
                    times[event.kind] += event.duration
            idle = step.end - step.start - sum(times.values())
            yield {
                "Device_id": device,
                "Step": step.number,
                "Computing": f"{times[Kind.KERNEL] / 1e3:.3f}",
                "Communication(Not Overlapped)": f"{times[Kind.COLLECTIVE] / 1e3:.3f}",
                "Overlapped": "0.000",
                "Communication": f"{times[Kind.COLLECTIVE] / 1e3:.3f}",
                "Free": f"{idle / 1e3:.3f}",
            }


TABLES = {
    "kernel_details.csv": kernel_details,
    "op_statistic.csv": op_statistic,
    "operator_details.csv": operator_details,
    "step_trace_time.csv": step_trace_time,
}


def write_folder(recording: Recording, folder: Path) -> None:
    """Everything under `folder`, which must not be there yet. A table without rows is left out."""
    output = folder / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    rank = os.environ.get("RANK")
    information = {"rank_id": int(rank) if rank else -1, "emulated": True, "process": os.getpid()}
    (folder / (f"profiler_info_{rank}.json" if rank else "profiler_info.json")).write_text(json.dumps(information))
    (folder / "profiler_metadata.json").write_text(json.dumps(recording.metadata))
    (output / "trace_view.json").write_text(json.dumps(chrome_trace(recording)))
    for name, rows_of in TABLES.items():
        rows = list(rows_of(recording))
        if rows:
            with (output / name).open("w", newline="") as file:
                table = csv.DictWriter(file, rows[0])
                table.writeheader()
                table.writerows(rows)
