#!/usr/bin/env python3
"""The command msprof of CANN, as far as torch_npu's profiler needs it: it exports what the emulated profiler recorded.

    msprof --export=on --output=PROF_FOLDER

PROF_FOLDER gets ``mindstudio_profiler_output`` with the files of CANN's msprof: the timeline of calls, streams and
collectives (``msprof_*.json``), tasks (``op_summary_*.csv``) and what calls and tasks took (``api_statistic_*.csv``,
``op_statistic_*.csv``). Tasks are computed by the host, so counters, shapes and links are not in them; ``--analyze=on``
therefore finds nothing, and there are no databases. Standard library only: any Python runs it.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT = "mindstudio_profiler_output"
CORE = "HOST_CPU"  # what computed a task; a device has AI_CORE, AI_VECTOR_CORE and others
NO_MODEL, NO_SUBTASK = 4294967295, 4294967295
# torch_npu checks every tenth of a second whether the export exists, and gives up its analysis if this command ends
# before the check. CANN's own takes longer than that.
SECONDS_TO_BE_SEEN = 2
# Processes of the timeline, by the number added to that of the device; the real process has one of its own.
CALLS, HARDWARE, COMMUNICATION, OVERLAP = 0, 100, 200, 300


@dataclass(frozen=True)
class Call:
    """A call of the host. Times are nanoseconds of the Unix epoch."""

    number: int
    name: str
    thread: int
    begin: int
    end: int


@dataclass(frozen=True)
class Task:
    """The work of a stream for a call."""

    call: int
    name: str
    stream: int
    begin: int
    end: int
    device: int

    @property
    def is_collective(self) -> bool:
        return self.name.startswith("Hccl")

    @property
    def is_computation(self) -> bool:
        return not self.is_collective and not self.name.startswith("aclrt")

    @property
    def type(self) -> str:
        """CANN's name of the type: aclnnMatmul is a Matmul, and HcclAllReduce is hcom_allReduce_."""
        if self.is_collective:
            words = self.name.removeprefix("Hccl")
            return f"hcom_{words[0].lower()}{words[1:]}_".replace("hcom_recv_", "hcom_receive_")
        return self.name.removeprefix("aclnn").removeprefix("aclrt")


def read_recording(folder: Path) -> tuple[list[Call], list[Task]]:
    """Read calls and tasks in the order in which they began.

    Raises:
        OSError, ValueError: the folder is not a recording.
    """
    start = json.loads((folder / "host" / "start_info").read_text())
    shift = int(start["collectionTimeBegin"]) * 1000 - int(start["clockMonotonicRaw"])
    calls = [
        Call(int(number), name, int(thread), int(begin) + shift, int(end) + shift)
        for number, name, thread, begin, end in _rows(folder / "host" / "data" / "calls.csv")
    ]
    tasks = [
        Task(int(call), name, int(stream), int(begin) + shift, int(end) + shift, int(device.name.split("_")[1]))
        for device in folder.glob("device_*")
        for call, name, stream, begin, end in _rows(device / "data" / "tasks.csv")
    ]
    return sorted(calls, key=lambda call: call.begin), sorted(tasks, key=lambda task: task.begin)


def _rows(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.reader(file))


def microseconds(time_ns: int) -> str:
    """Format a time as CANN does: all digits, three of them after the point."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans into disjoint ones in order: (1, 3), (2, 5), (7, 8) -> (1, 5), (7, 8)."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def without(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Subtract other spans, both disjoint and in order: (1, 8) without (2, 3) -> (1, 2), (3, 8)."""
    left = []
    for begin, end in spans:
        for other_begin, other_end in others:
            if other_end <= begin or other_begin >= end:
                continue
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def timeline(calls: Sequence[Call], tasks: Sequence[Task], pid: int) -> list[dict]:
    """Return the trace: calls by thread, tasks by stream, collectives, overlaps, and arrows from calls to tasks."""
    process = pid * 1024
    events = _lane(process + CALLS, "CANN", "CPU")
    for call in calls:
        events.append(_span(f"AscendCL@{call.name}", process + CALLS, call.thread, call.begin, call.end))
    begun = {call.number: call for call in calls}
    for device in sorted({task.device for task in tasks}):
        here = [task for task in tasks if task.device == device]
        label = f"NPU {device}"
        events += _lane(process + HARDWARE + device, "Ascend Hardware", label)
        events += _lane(process + COMMUNICATION + device, "Communication", label)
        events += _lane(process + OVERLAP + device, "Overlap Analysis", label)
        for number, task in enumerate(here):
            lane = process + device + (COMMUNICATION if task.is_collective else HARDWARE)
            details = {"Model Id": NO_MODEL, "Task Type": _core(task), "Stream Id": task.stream, "Task Id": number,
                       "Batch Id": 0, "Subtask Id": NO_SUBTASK, "connection_id": task.call}  # fmt: skip
            name = f"{task.type}_{number}" if task.is_collective else task.name
            events.append(_span(name, lane, task.stream, task.begin, task.end) | {"args": details})
            if task.call in begun:
                events += _arrow(len(events), begun[task.call], process + CALLS, lane, task)
        events += _overlaps(here, process + OVERLAP + device)
    return events


def _lane(process: int, name: str, label: str) -> list[dict]:
    said = {"process_name": {"name": name}, "process_labels": {"labels": label}}
    return [{"name": kind, "pid": process, "tid": 0, "ph": "M", "args": said[kind]} for kind in said]


def _span(name: str, process: int, thread: int, begin: int, end: int) -> dict:
    return {"name": name, "pid": process, "tid": thread, "ts": microseconds(begin), "dur": (end - begin) / 1000,
            "ph": "X", "args": {}}  # fmt: skip


def _arrow(number: int, call: Call, calls: int, lane: int, task: Task) -> Iterator[dict]:
    common = {"name": f"HostToDevice{number}", "cat": "HostToDevice", "id": str(number)}
    yield common | {"ph": "s", "pid": calls, "tid": call.thread, "ts": microseconds(call.begin)}
    yield common | {"ph": "f", "bp": "e", "pid": lane, "tid": task.stream, "ts": microseconds(task.begin)}


def _overlaps(tasks: Sequence[Task], lane: int) -> list[dict]:
    computing = union((task.begin, task.end) for task in tasks if task.is_computation)
    communication = union((task.begin, task.end) for task in tasks if task.is_collective)
    busy = union([*computing, *communication])
    found = {
        "Computing": computing,
        "Communication": communication,
        "Communication(Not Overlapped)": without(communication, computing),
        "Free": without([(busy[0][0], busy[-1][1])], busy) if busy else [],
    }
    return [
        _span(name, lane, thread, begin, end)
        for thread, (name, spans) in enumerate(found.items())
        for begin, end in spans
    ]


def _core(task: Task) -> str:
    return "HCCL" if task.is_collective else CORE if task.is_computation else "MEMCPY_ASYNC"


def op_summary(tasks: Sequence[Task]) -> Iterator[dict]:
    """Return a row for each computation and collective."""
    ended: dict[tuple[int, int], int] = {}
    for number, task in enumerate(tasks):
        before = ended.get((task.device, task.stream), task.begin)
        ended[task.device, task.stream] = task.end
        if task.is_collective or task.is_computation:
            yield {
                "Device_id": task.device,
                "Model ID": NO_MODEL,
                "Task ID": number,
                "Stream ID": task.stream,
                "Op Name": f"{task.type}_{number}" if task.is_collective else task.name,
                "OP Type": task.type,
                "OP State": "N/A",
                "Task Type": _core(task),
                "Task Start Time(us)": microseconds(task.begin) + "\t",
                "Task Duration(us)": (task.end - task.begin) / 1000,
                "Task Wait Time(us)": max(task.begin - before, 0) / 1000,
                "Block Dim": 0,
                "Mix Block Dim": 0,
                "HF32 Eligible": "NO",
                "Input Shapes": "N/A",
                "Input Data Types": "N/A",
                "Input Formats": "N/A",
                "Output Shapes": "N/A",
                "Output Data Types": "N/A",
                "Output Formats": "N/A",
                "Context ID": "N/A",
            }


def op_statistic(tasks: Sequence[Task]) -> Iterator[dict]:
    """Return a row for each type of computation on a device, the longest first."""
    took: dict[tuple[int, str], list[float]] = defaultdict(list)
    for task in tasks:
        if task.is_computation:
            took[task.device, task.type].append((task.end - task.begin) / 1000)
    for (device, kind), times in sorted(took.items(), key=lambda entry: -sum(entry[1])):
        everything = sum(sum(every) for (other, _), every in took.items() if other == device)
        yield {
            "Device_id": device, "OP Type": kind, "Core Type": CORE, "Count": len(times), "Total Time(us)": sum(times),
            "Min Time(us)": min(times), "Avg Time(us)": sum(times) / len(times), "Max Time(us)": max(times),
            "Ratio(%)": round(100 * sum(times) / everything, 3) if everything else 0,
        }  # fmt: skip


def api_statistic(calls: Sequence[Call]) -> Iterator[dict]:
    """Return a row for each function that the host called."""
    took: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        took[call.name].append((call.end - call.begin) / 1000)
    for name, times in sorted(took.items()):
        mean = sum(times) / len(times)
        yield {
            "Device_id": "host", "Level": "acl", "API Name": name, "Time(us)": sum(times), "Count": len(times),
            "Avg(us)": mean, "Min(us)": min(times), "Max(us)": max(times),
            "Variance": sum((each - mean) ** 2 for each in times) / len(times),
        }  # fmt: skip


def write_table(path: Path, rows: Iterable[dict]) -> None:
    """Write a CSV file with a header; no file if there are no rows."""
    listed = list(rows)
    if listed:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, fieldnames=list(listed[0]))
            table.writeheader()
            table.writerows(listed)


def export(folder: Path) -> None:
    """Write ``mindstudio_profiler_output`` anew. All its files appear at once: readers wait for the first of them."""
    calls, tasks = read_recording(folder)
    pid = int(json.loads((folder / "host" / "start_info").read_text())["pid"])
    stamp, partial = time.strftime("%Y%m%d%H%M%S"), folder / f".{OUTPUT}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    (partial / f"msprof_{stamp}.json").write_text(json.dumps(timeline(calls, tasks, pid)))
    write_table(partial / f"op_summary_{stamp}.csv", op_summary(tasks))
    write_table(partial / f"op_statistic_{stamp}.csv", op_statistic(tasks))
    write_table(partial / f"api_statistic_{stamp}.csv", api_statistic(calls))
    shutil.rmtree(folder / OUTPUT, ignore_errors=True)
    partial.rename(folder / OUTPUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(prog="msprof", description=__doc__)
    parser.add_argument("--export", choices=("on", "off"), default="off")
    parser.add_argument("--analyze", choices=("on", "off"), default="off")
    parser.add_argument("--output", type=Path, required=True, metavar="PROF_FOLDER")
    given = parser.parse_args(arguments)
    try:
        if given.export == "on":
            export(given.output)
            time.sleep(SECONDS_TO_BE_SEEN)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {given.output} does not contain a recording of the emulated CANN: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
