"""The heartbeat of one process: a thread of its own sends it, so it continues whatever the process computes.

A heartbeat says which phase the process is in, how often it has made progress, and where its code is. The thread can
report on a main thread that hangs and cannot report itself: a stopped process sends nothing at all, and one that waits
for others is seen to wait.
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
"""A phase without limits: the process waits for work that another one does."""
WAITS = "waits in "
_WAITING_CALLS = ("wait(", "synchronize(", "ray.get(")
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
# Innermost frames to search for a collective, since those beneath it belong to its implementation.
_INNERMOST = 8


@dataclass(frozen=True)
class Sign:
    """One heartbeat.

    Attributes:
        name: the rank, `trainer`, or the name of another process.
        serial: counts heartbeats.
        moves: counts progress.
        phase: None between the calls of a worker.
        where: the place of the process's code, as in `place_of`.
        step: of the training loop.
        started: when the process began, as in `process_start`.
    """

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
        """Return the heartbeat as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, content: bytes) -> Sign:
        """Read a heartbeat from the bytes that `packed` returned."""
        return cls(**json.loads(content))


class Signs:
    """Phase and progress of a process, as its sender thread reads them. Phases nest; the innermost counts."""

    def __init__(self) -> None:
        self._phases: list[str] = []
        self._moves = 0
        self.step: Callable[[], int | None] = lambda: None
        self.sender: threading.Thread | None = None
        self.works_in: int | None = threading.main_thread().ident
        """The thread that entered the last outermost phase: an asyncio actor of Ray works beside its main thread."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the block as this phase; `NO_PHASE` marks it as none."""
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
            of: count only while the process is in this phase. Threads beside the main one set it: their progress must
                not hide that the main thread hangs in another phase.
        """
        if of is None or self._phases[-1:] == [of]:
            self._moves += 1

    def now(self, name: str, serial: int, where: str) -> Sign:
        """Return the heartbeat of this moment, at which the process is at `where`."""
        phase = self._phases[-1] if self._phases else None
        if name == TRAINER and where.startswith(f"{WAITS}ray"):
            phase = None  # for the workers, who have phases of their own
        host, pid = os.uname().nodename, os.getpid()
        return Sign(name, serial, self._moves, phase or None, where, self.step(), host, pid, process_start(pid))


def process_signs() -> Signs:
    """Return the phase and progress of this process."""
    return process_context().of(Signs)


def start_in_ray(name: str, interval_s: float) -> None:
    """Start sending to the driver of this Ray job; without Ray there is nobody to send to."""
    import ray

    if ray.is_initialized():
        from post_training.hang_detection.ray_store import RayStore

        start_sending(name, interval_s, RayStore().send)


def start_sending(name: str, interval_s: float, send: Send) -> None:
    """Send a heartbeat every `interval_s` seconds from now on, the first at once; only the first call counts."""
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
    """Return where a process is: where its working thread is or, if that does not wait, the collective that another
    thread is in, as in a backward pass on a device."""
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
    """Return where a thread is, for a person: `waits in all_reduce` for a collective or Ray, else file, line, function.

    A collective shows in Python's frames; a wait for the device or for a request shows in the source line itself.
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
    """Return when a process began, in the kernel's clock ticks since boot; with the pid, it identifies the process."""
    return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
