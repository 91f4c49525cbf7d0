"""The files of a run's output folder that other programs read while the run goes on."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_written: set[str] = set()


class RunFiles:
    """Writers for the folder `output_dir`; with an empty `output_dir` nothing is written.

    metrics.jsonl   one object a step: {"step": int, "time": unix seconds, "metrics": {name: number or null}}
    events.jsonl    one object an event: {"time": unix seconds, "event": name}
    faults.jsonl    one object a fault: {"time": unix seconds, "kind": name, "step": int, "message": clause, ...}
    overlay.json    the patches of a worker process
    patches.jsonl   one object whenever patches ran for the first time in a process: {"process": id, "executed": labels}
    """

    def __init__(self, output_dir: str):
        self._folder = Path(output_dir) if output_dir else None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step. Numbers that JSON cannot hold (NaN, infinity) become null."""
        plain = {name: _plain(value) for name, value in metrics.items()}
        self._append("metrics.jsonl", {"step": step, "time": time.time(), "metrics": plain})

    def note(self, event: str) -> None:
        """Append one event with the present time."""
        self._append("events.jsonl", {"time": time.time(), "event": event})

    def fault(self, kind: str, message: str, step: int | None, **facts: Any) -> None:
        """Append something that makes the run untrue or ends it; `facts` are further keys."""
        self._append("faults.jsonl", {"time": time.time(), "kind": kind, "step": step, "message": message, **facts})

    def overlay(self, report: Mapping[str, Any]) -> None:
        """Write the report on patches, replacing an earlier one at once."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"overlay.json.{os.getpid()}"
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        unfinished.replace(self._folder / "overlay.json")

    def executed(self, labels: Iterable[str]) -> None:
        """Append those of the executed patches that this process has not written yet."""
        new = sorted(set(labels) - _written)
        if new:
            self._append("patches.jsonl", {"process": os.getpid(), "executed": new})
            _written.update(new)

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # One write of a whole line in append mode: lines of several processes do not mix.
        line = (json.dumps(entry, allow_nan=False) + "\n").encode()
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def read_executed(folder: Path) -> list[str]:
    """The labels of the patches that ran in any process of the run in `folder`, sorted; none if it recorded nothing."""
    file = folder / "patches.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted({label for line in lines for label in json.loads(line)["executed"]})


def read_faults(folder: Path) -> list[dict[str, Any]]:
    """The faults that a run in `folder` has written so far, in order."""
    file = folder / "faults.jsonl"
    complete, _, _ = (file.read_text() if file.exists() else "").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it; numpy and torch scalars become Python numbers."""
    if getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
