"""Counters of the emulated device's work in this process: operators, copies, collectives, memory.

    with meters.phase("rollout"):
        ...
    meters.snapshot()["phases"]["rollout"]["operators"]["aclnnMatmul"]["calls"]

With NPU_EMULATOR_METERS=<folder> in the environment, a process writes its snapshot to ``<folder>/<pid>.json`` within a
second of a change, at exit, and whenever `write` is called.
"""

import contextlib
import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from . import counters
from .process_end import at_process_end

_COPY_KINDS = ("host_to_device", "device_to_host", "device_to_device", "transposing_on_device")
_GRAPHS = ("captured", "replayed", "tasks")  # tasks: operators, copies and collectives that replays have done
_SECONDS_BETWEEN_WRITES = 1.0
_FOLDER_VARIABLE = "NPU_EMULATOR_METERS"


@dataclasses.dataclass(frozen=True)
class _Totals:
    """Counters at one moment, or their growth between two."""

    operators: Counter
    copies: Counter
    collectives: Counter
    graphs: Counter

    @classmethod
    def now(cls) -> "_Totals":
        copies, collectives = Counter(), Counter()
        for kind, (count, size) in zip(_COPY_KINDS, counters.copies(), strict=True):
            copies[kind, "count"], copies[kind, "bytes"] = count, size
        for kind, ranks, count, size in counters.collectives():
            collectives[kind, ranks, "count"], collectives[kind, ranks, "bytes"] = count, size
        graphs = Counter(dict(zip(_GRAPHS, counters.graphs(), strict=True)))
        return cls(Counter(counters.operator_calls()), copies, collectives, graphs)

    def since(self, earlier: "_Totals") -> "_Totals":
        return _Totals(
            self.operators - earlier.operators,
            self.copies - earlier.copies,
            self.collectives - earlier.collectives,
            self.graphs - earlier.graphs,
        )

    def add(self, growth: "_Totals") -> None:
        self.operators.update(growth.operators)
        self.copies.update(growth.copies)
        self.collectives.update(growth.collectives)
        self.graphs.update(growth.graphs)

    def as_dict(self) -> dict:
        collectives: dict = {}
        for (kind, ranks, what), value in sorted(self.collectives.items()):
            by_size = collectives.setdefault(kind, {}).setdefault(str(ranks), {"count": 0, "bytes": 0})
            by_size[what] = value
        return {
            "operators": {name: {"calls": calls} for name, calls in sorted(self.operators.items())},
            "copies": {
                kind: {"count": self.copies[kind, "count"], "bytes": self.copies[kind, "bytes"]} for kind in _COPY_KINDS
            },
            "collectives": collectives,
            "graphs": {what: self.graphs[what] for what in _GRAPHS},
        }


class _Phase:
    """The counters under one name, summed over all the times that the phase was entered."""

    def __init__(self):
        self.entered = 0
        self.totals = _Totals(Counter(), Counter(), Counter(), Counter())
        self.peak_bytes: dict[int, int] = {}
        self.allocated_bytes: dict[int, int] = {}

    def as_dict(self) -> dict:
        return {
            "entered": self.entered,
            **self.totals.as_dict(),
            "peak_bytes": {str(device): size for device, size in self.peak_bytes.items()},
            "allocated_bytes": {str(device): size for device, size in self.allocated_bytes.items()},
        }


_phases: dict[str, _Phase] = {}


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the work inside the block under `name` too. Phases may nest and be entered again; they are per process.

    By device, ``peak_bytes`` is the most memory that was allocated during the phase, and ``allocated_bytes`` the memory
    still allocated when the phase last ended: all that torch_npu's allocator has taken, in use or not.
    """
    devices = range(counters.device_count())
    before = _Totals.now()
    outer_watermarks = [counters.exchange_watermark(device, 0) for device in devices]
    try:
        yield
    finally:
        entered = _phases.setdefault(name, _Phase())
        entered.entered += 1
        entered.totals.add(_Totals.now().since(before))
        for device in devices:
            peak = counters.exchange_watermark(device, 0)
            counters.exchange_watermark(device, max(outer_watermarks[device], peak))
            allocated = counters.memory_statistics(device)["allocated"]
            if peak or allocated:
                entered.peak_bytes[device] = max(peak, entered.peak_bytes.get(device, 0))
                entered.allocated_bytes[device] = allocated


def snapshot() -> dict:
    """Return everything counted in this process so far.

    ``operators``: name -> calls, by CANN's names, such as aclnnAdd. ``copies``: by direction, count and bytes; those on
    the device that transpose, so that neighbours in memory do not stay neighbours, are also listed by themselves.
    ``collectives``: kind -> group size -> count and bytes that this rank sent (for ``recv``, received). ``graphs``: how
    many were captured and replayed, and how much their replays did; a replay's work also counts under its own kind.
    ``memory``: by device, bytes. ``phases``: the same, by name of the phase.
    """
    memory = {str(device): counters.memory_statistics(device) for device in range(counters.device_count())}
    return {
        "pid": os.getpid(),
        **_Totals.now().as_dict(),
        "memory": {device: numbers for device, numbers in memory.items() if numbers["allocations"]},
        "phases": {name: entered.as_dict() for name, entered in _phases.items()},
    }


def reset_phases() -> None:
    """Forget the phases. The counters of the process go on."""
    _phases.clear()


def write(folder: str | None = None) -> Path | None:
    """Write the snapshot as ``<pid>.json`` into `folder`, by default NPU_EMULATOR_METERS; None if neither is given.

    Readers see the old file or the new one, never a part of it.
    """
    folder = folder or os.environ.get(_FOLDER_VARIABLE)
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    target = Path(folder) / f"{os.getpid()}.json"
    partial = target.with_suffix(f".{threading.get_ident()}.part")
    partial.write_text(json.dumps(snapshot()))
    partial.replace(target)
    return target


def _write_if_used() -> None:
    if counters.is_initialized():
        write()


def _keep_writing() -> None:
    pause, written = threading.Event(), None
    while True:
        pause.wait(_SECONDS_BETWEEN_WRITES)
        counted = _Totals.now()
        if counted != written:
            _write_if_used()
            written = counted


def _begin_to_write() -> None:
    threading.Thread(target=_keep_writing, name="npu-emulator-meters", daemon=True).start()


def start_writing() -> None:
    """Begin to write regularly if NPU_EMULATOR_METERS asks for it: a process that is killed writes nothing at its end.

    A forked process starts its own thread, because its parent's does not run there, and writes to the folder that its
    own environment names.
    """
    if os.environ.get(_FOLDER_VARIABLE):
        at_process_end(_write_if_used)
        _begin_to_write()
        os.register_at_fork(after_in_child=_begin_to_write)
