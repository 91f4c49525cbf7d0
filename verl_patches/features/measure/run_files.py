"""The files of a run's output folder that other programs read while the run goes on."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from post_training.masking import masked
from post_training.process_context import process_context
from post_training.report.heartbeat import HEARTBEAT
from post_training.report.metrics import MEMORY, PATCHES, read_entries
from post_training.report.object_files import append_object, replace_object
from post_training.report.samples import FIRST, LAST, Sample


@dataclass(frozen=True)
class _Written:
    """Values that this process has already written.

    Attributes:
        patches: labels of the executed patches.
        peak_bytes: the device's peak memory, by phase.
        end_bytes: memory allocated at the end of a phase, by phase; the highest so far.
    """

    patches: set[str] = field(default_factory=set)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    end_bytes: dict[str, int] = field(default_factory=dict)


class RunFiles:
    """Writers for the folder `output_dir`; with an empty `output_dir` nothing is written.

    metrics.jsonl   one object per step: {"step": int, "time": unix seconds, "metrics": {name: number or null}}
    events.jsonl    one object per event: {"time": unix seconds, "event": name}
    faults.jsonl    one object per fault: {"time": unix seconds, "kind": name, "step": int, "message": clause, ...}
    alerts.jsonl    one object per alert: {"time": unix seconds, "step": int, "alert": name, "message": ...}
    heartbeat.json  whether the run makes progress: post_training/report/heartbeat.py
    overlay.json    the patches of a worker process
    patches/HOST.PROCESS.jsonl
                    one object whenever patches ran for the first time in a process: {"process": id, "executed": labels}
                    Every process has its own file: appends of two nodes to one file on NFS overwrite each other
    samples.first.json, samples.last.json
                    {"step": int, "samples": [...]}: some responses of the first and of the last step, with rewards
    memory/RANK.json
                    {"rank": int, "peak_bytes": {phase: int}, "end_bytes": {phase: int}}: the highest of a process
    """

    def __init__(self, output_dir: str):
        self._folder = Path(output_dir) if output_dir else None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step. Numbers that JSON cannot hold (NaN, infinity) become null."""
        plain = {name: _plain(value) for name, value in metrics.items()}
        self._append("metrics.jsonl", {"step": step, "time": time.time(), "metrics": plain})

    def note(self, event: str, **facts: Any) -> None:
        """Append one event with the present time; `facts` are further keys."""
        self._append("events.jsonl", {"time": time.time(), "event": event, **masked(facts)})

    def fault(self, kind: str, message: str, step: int | None, **facts: Any) -> None:
        """Append a fault, which invalidates the run or ends it; `facts` are further keys."""
        said = masked({"message": message, **facts})
        self._append("faults.jsonl", {"time": time.time(), "kind": kind, "step": step, **said})

    def alert(self, alert: Mapping[str, Any]) -> None:
        """Append a rule that was met: step, alert and message."""
        self._append("alerts.jsonl", {"time": time.time(), **masked(dict(alert))})

    def heartbeat(self, progress: int, step: int | None, process: str, phase: str | None) -> None:
        """Replace the run's heartbeat: the processes' progress counter, and which process made progress last."""
        content = {"progress": progress, "time": time.time(), "step": step, "process": process, "phase": phase}
        self._replace(HEARTBEAT, content)

    def overlay(self, report: Mapping[str, Any]) -> None:
        """Write the report on patches, atomically replacing an earlier one."""
        self._replace("overlay.json", report)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples of a step as the last step's, and as the first's unless those of an earlier step are there.

        A run that resumes from before its first samples replaces them.
        """
        if self._folder is None or not samples:
            return
        content = {"step": step, "samples": [sample.as_dict() for sample in samples]}
        kept = self._folder / FIRST
        if not kept.exists() or json.loads(kept.read_text())["step"] >= step:
            self._replace(FIRST, content)
        self._replace(LAST, content)

    def memory(self, rank: int, peak_bytes: Mapping[str, int], end_bytes: Mapping[str, int]) -> None:
        """Take in the device memory of a step by phase, and write the highest values of this process so far."""
        written = process_context().of(_Written)
        for kept, seen in ((written.peak_bytes, peak_bytes), (written.end_bytes, end_bytes)):
            for phase, size in seen.items():
                kept[phase] = max(size, kept.get(phase, 0))
        self._replace(
            f"{MEMORY}/{rank}.json", {"rank": rank, "peak_bytes": written.peak_bytes, "end_bytes": written.end_bytes}
        )

    def _replace(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of one JSON object, atomically replacing an earlier one."""
        if self._folder is None:
            return
        replace_object(self._folder / name, content)

    def executed(self, labels: Iterable[str]) -> None:
        """Append those of the executed patches that this process has not written yet."""
        written = process_context().of(_Written).patches
        new = sorted(set(labels) - written)
        if new:
            name = f"{PATCHES}/{socket.gethostname()}.{os.getpid()}.jsonl"
            self._append(name, {"process": os.getpid(), "executed": new})
            written.update(new)

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        append_object(self._folder / name, entry)


def read_executed(folder: Path) -> list[str]:
    """Return the sorted labels of patches that ran in any process of the run in `folder`; none if none is recorded."""
    return sorted({label for entry in read_patches(folder) for label in entry["executed"]})


def read_patches(folder: Path) -> list[dict[str, Any]]:
    """Return the records of executed patches that the processes of the run in `folder` wrote, process by process."""
    return [entry for file in sorted((folder / PATCHES).glob("*.jsonl")) for entry in read_entries(file)]


def read_faults(folder: Path) -> list[dict[str, Any]]:
    """Return the faults that the run in `folder` has written so far, in order."""
    return read_entries(folder / "faults.jsonl")


def _plain(value: Any) -> Any:
    """Return `value` as a JSON value; numpy and torch scalars become Python numbers."""
    if getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
