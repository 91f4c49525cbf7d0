"""Streams and events. Work is finished when a call returns, so they order nothing, but keep identity and time."""

import itertools
import time
from typing import Optional

import torch
from torch._streambase import _EventBase, _StreamBase

from npu_emulator import _C

_next_stream = itertools.count(1)


class CapturedStreams:
    """The streams whose work goes into the graph that is being captured: the first, and those that wait for one."""

    def __init__(self, origin: "Stream"):
        self.origin = origin
        self.streams = {origin}
        self.ahead: set[Stream] = set()  # have work that no other stream waits for

    def enter(self, stream: "Stream") -> None:
        """Note that the thread works on a stream from now on."""
        _C.set_bystander(stream not in self.streams)
        if stream in self.streams - {self.origin}:
            self.ahead.add(stream)

    def wait(self, waiting: "Stream", other: Optional["Stream"]) -> None:
        """Note that a stream waits for what another has been given so far."""
        if other in self.streams:
            self.ahead.discard(other)
            self.streams.add(waiting)
            if waiting != self.origin:
                self.ahead.add(waiting)

    def fault_at_end(self, stream: "Stream") -> str:
        """Why the capture may not end on this stream, or nothing."""
        if stream != self.origin:
            return "Capture must end on the same stream it began on."
        if self.ahead:
            return "the capture of this NPU graph is invalid: its first stream has not waited for all streams in it"
        return ""


capture: CapturedStreams | None = None


def _wait_for_device() -> None:
    if _C.deferred_collectives():
        _C.complete_deferred_collectives()


def wait_on_host(what: str) -> None:
    """Make the host wait for the device, which it may not do while a graph is captured."""
    _C.refuse_in_graph(f"{what}, for which the host waits")
    _wait_for_device()


class Stream(_StreamBase):
    """A queue of work of one device."""

    def __init__(self, device=None, priority: int = 0, stream_id: int | None = None, **_):
        index = device.index if isinstance(device, torch.device) else device
        if isinstance(device, str):
            index = torch.device(device).index
        self.device_index = _C.current_device() if index is None else index
        self.device = torch.device("npu", self.device_index)
        self.device_type = "npu"
        self.stream_id = next(_next_stream) if stream_id is None else stream_id
        self.npu_stream = self.stream_id
        self.priority = priority

    def wait_event(self, event: "Event") -> None:
        if capture is not None:
            capture.wait(self, event._recorded_on)
        _wait_for_device()

    def wait_stream(self, stream: "Stream") -> None:
        if capture is not None:
            capture.wait(self, stream)
        _wait_for_device()

    def record_event(self, event: Optional["Event"] = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return not _C.deferred_collectives()

    def synchronize(self) -> None:
        wait_on_host("Stream.synchronize")

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __repr__(self) -> str:
        return f"<torch_npu.npu.Stream device={self.device} npu_stream={self.npu_stream:#x}>"


class SyncLaunchStream(Stream):
    """A stream without a task queue, which makes no difference here."""


class Event(_EventBase):
    """A point in a stream. With `enable_timing` it remembers when it was reached."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._timed = enable_timing
        self._reached: float | None = None
        self._recorded_on: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._reached = time.perf_counter()
        self._recorded_on = stream or torch.npu.current_stream()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or torch.npu.current_stream()).wait_event(self)

    def query(self) -> bool:
        return not _C.deferred_collectives()

    def synchronize(self) -> None:
        wait_on_host("Event.synchronize")

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to another."""
        if not (self._timed and end_event._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'")
        if self._reached is None or end_event._reached is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._reached - self._reached) * 1e3

    def recorded_time(self) -> float:
        return self._reached

    @property
    def npu_event(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<torch_npu.npu.Event {self.npu_event:#x}>"


class ExternalEvent(Event):
    """An event that a captured graph waits for; it can be reset and recorded again."""

    def reset(self, stream: Stream | None = None) -> None:
        self._reached = None
