"""The heartbeat of one process: a thread of its own sends it, so it goes on whatever the process computes.

A heartbeat says which phase the process is in, how often it has made progress, and where its code is. What the thread
can see of a process that hangs is worth more than what the process itself could still say: a stopped process sends
nothing at all, and one that waits for others says so.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from post_training.process_context import process_context

Send = Callable[[str, bytes], None]

TRAINER = "trainer"
NO_PHASE = ""
"""In it a process has no limit: another one does what it waits for."""
WAITS = "waits in "
_WAITING_CALLS = ("wait(", "synchronize(", "ray.get(")
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
# Frames beneath a collective that belong to its implementation, and not to what was asked for.
_INNERMOST = 8


@dataclass(frozen=True)
class Sign:
    """One heartbeat. `serial` counts signs, `moves` progress; `phase` is None between the calls of a worker."""

    name: str
    serial: int
    moves: int
    phase: str | None
    where: str
    step: int | None
    host: str
    pid: int
    started: float

    def packed(self) -> bytes:
        """As bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, content: bytes) -> Sign:
        """Out of what `packed` returned."""
        return cls(**json.loads(content))


class Signs:
    """What the sender thread of a process reads: its phase and its progress. Phases nest; the innermost counts."""

    def __init__(self) -> None:
        self._phases: list[str] = []
        self._moves = 0
        self.step: Callable[[], int | None] = lambda: None
        self.sender: threading.Thread | None = None
        self.works_in: int | None = threading.main_thread().ident
        """The thread that entered the last outermost phase: an asyncio actor of Ray works beside its main thread."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is this phase, or none with `NO_PHASE`."""
        if not self._phases:
            self.works_in = threading.get_ident()
        self._phases.append(name)
        self._moves += 1
        try:
            yield
        finally:
            self._phases.pop()
            self._moves += 1

    def progress(self, of: str | None = None) -> None:
        """Count one finished unit of work: a micro batch, an optimizer step, an answer, a part of a file.

        Args:
            of: count only while the process is in this phase. A thread that works beside the main one says so: what it
                finishes must not hide that the main thread hangs in another phase.
        """
        if of is None or self._phases[-1:] == [of]:
            self._moves += 1

    def now(self, name: str, serial: int, where: str) -> Sign:
        """The sign of this moment, in which the process is at `where`."""
        phase = self._phases[-1] if self._phases else None
        if name == TRAINER and where.startswith(f"{WAITS}ray"):
            phase = None  # for the workers, who have phases of their own
        host, pid = os.uname().nodename, os.getpid()
        return Sign(name, serial, self._moves, phase or None, where, self.step(), host, pid, process_start(pid))


def process_signs() -> Signs:
    """Those of this process."""
    return process_context().of(Signs)


def start_in_ray(name: str, interval_s: float) -> None:
    """Start sending to the driver of this Ray job; without Ray there is nobody to send to."""
    import ray

    if ray.is_initialized():
        from post_training.hang_detection.ray_store import RayStore

        start_sending(name, interval_s, RayStore().send)


def start_sending(name: str, interval_s: float, send: Send) -> None:
    """Give a sign every `interval_s` seconds from now on, the first at once; only the first call counts."""
    signs = process_signs()
    if signs.sender is not None:
        return
    pause = threading.Event()

    def go_on() -> None:
        for serial in range(sys.maxsize):
            try:
                send(name, signs.now(name, serial, place_of(sys._current_frames(), signs.works_in)).packed())
            except Exception:  # Ray's head may be gone for a moment or for good; the next sign is another chance
                pass
            pause.wait(interval_s)

    signs.sender = threading.Thread(target=go_on, name="heartbeats", daemon=True)
    signs.sender.start()


def place_of(frames: Mapping[int, FrameType], main: int | None) -> str:
    """Where a process is: its working thread, or the collective of another one, as of a backward pass on a device."""
    where = place(frames.get(main) if main is not None else None)
    if where.startswith(WAITS):
        return where
    others = (place(frame) for thread, frame in frames.items() if thread != main and _in_collective(frame))
    return next(others, where)


def _in_collective(frame: FrameType | None) -> bool:
    depth = 0
    while frame is not None and depth < _INNERMOST:
        if frame.f_code.co_filename.endswith(_COLLECTIVES):
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def place(frame: FrameType | None) -> str:
    """Where a thread is, for a person: `waits in all_reduce` of a collective or of Ray, else file, line and function.

    Python sees a collective where it was called; a wait for the device or for a request shows in the line itself.
    """
    if frame is None:
        return "unknown"
    waits_in, depth = "", 0
    each: FrameType | None = frame
    while each is not None and depth < _INNERMOST:
        file = each.f_code.co_filename
        if file.endswith(_COLLECTIVES) and each.f_code.co_name != "wrapper":
            waits_in = each.f_code.co_name
        elif "/ray/_private/" in file and each.f_code.co_name in ("get", "wait", "get_objects"):
            waits_in = f"ray.{each.f_code.co_name}"
        each, depth = each.f_back, depth + 1
    if waits_in:
        return WAITS + waits_in
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    here = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return WAITS + here if any(call in line for call in _WAITING_CALLS) else f"at {here}"


def process_start(pid: int) -> float:
    """When a process began, in the kernel's clock ticks since boot: together with its number it names it for ever."""
    return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
