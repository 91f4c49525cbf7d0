"""The driver's side: a thread that reads the heartbeats, names the processes that stopped, ends the run if they do not
recover, and writes the run's own heartbeat into its folder."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from post_training.hang_detection.limits import Stop, Watch
from post_training.hang_detection.settings import WatchSettings
from post_training.hang_detection.signs import Sign, process_start
from post_training.report.faults import NOT_ANSWERING

_JOIN_S = 10.0


class Records(Protocol):
    """Writer of stops and of progress; implemented by `records.RunRecords` and `measure.run_files.RunFiles`."""

    def fault(self, kind: str, message: str, step: int | None, **facts: Any) -> None: ...
    def heartbeat(self, progress: int, step: int | None, process: str, phase: str | None) -> None: ...


class Watcher:
    """The work of the thread at every interval.

    Args:
        watch: the processes and their limits.
        received: returns the newest heartbeat of every process.
        files: writes stops and progress.
        end: called once, when the second limit is passed.
    """

    def __init__(self, watch: Watch, received: Callable[[], Iterable[bytes]], files: Records, end: Callable[[], None]):
        self._watch, self._received, self._files, self._end = watch, received, files, end
        self._named: dict[str, Stop] = {}
        self._shown = 0
        self.sentence = ""

    def look(self) -> None:
        """Read all heartbeats; name the processes that have stopped since the last look, and those that recovered."""
        for content in self._received():
            self._watch.hear(Sign.unpacked(content))
        self._show_progress()
        stops = {stop.name: stop for stop in self._watch.stopped()}
        for name in [name for name in self._named if name not in stops]:
            stop = self._named.pop(name)
            print(f"warning: {stop.who} continues after {stop.seconds:.0f} s", file=sys.stderr, flush=True)
        for name, stop in stops.items():
            if name not in self._named:
                self._say(stop)
            self._named[name] = stop
        ending = [stop for stop in stops.values() if stop.beyond_end]
        if ending and not self.sentence:
            self.sentence = f"{'; '.join(stop.sentence() for stop in ending)}; the run was ended"
            for stop in ending:
                self._write(stop)
                _kill_if_here(stop)
            self._end()

    def _show_progress(self) -> None:
        """Write the run's heartbeat if any process has made progress since it was last written."""
        newest, progress = self._watch.newest, self._watch.progress
        if newest is None or progress == self._shown:
            return
        try:
            self._files.heartbeat(progress, self._watch.step, newest.name, newest.phase)
        except OSError as error:  # hangs are still seen here, and a disk that is full ends the run by itself
            print(f"warning: the run's heartbeat cannot be written ({error.strerror})", file=sys.stderr, flush=True)
        self._shown = progress

    def _say(self, stop: Stop) -> None:
        print(f"warning: {stop.sentence()}", file=sys.stderr, flush=True)
        self._write(stop)

    def _write(self, stop: Stop) -> None:
        rank = int(stop.name) if stop.name.isdigit() else stop.name
        facts = {"rank": rank, "phase": stop.phase, "seconds": round(stop.seconds, 1), "ended": stop.beyond_end}
        self._files.fault(NOT_ANSWERING, stop.sentence(), stop.step, **facts, waiting=list(stop.waiting))


@contextmanager
def watching(
    settings: WatchSettings,
    ranks: int,
    files: Records,
    isolated_ray: bool,
    end: Callable[[], None] = lambda: _thread.interrupt_main(signal.SIGTERM),
) -> Iterator[Watcher]:
    """Watch the Ray job of this process for hangs while the block runs.

    When the second limit is passed, `end` is called in another thread. By default the main thread is interrupted as by
    SIGTERM, for which it must have a handler; `Watcher.sentence` then says why. Afterwards the heartbeats in Ray are
    deleted, unless `isolated_ray` says that Ray ends with the run.
    """
    from post_training.hang_detection.ray_store import RayStore

    store, over = RayStore(), threading.Event()
    watch = Watch(settings, ranks, time.monotonic)
    watcher = Watcher(watch, store.received, files, end)

    def follow() -> None:
        while not over.wait(settings.interval_s):
            try:
                watcher.look()
            except Exception as error:  # the store is away for a moment, or for good: then the run ends by itself
                print(f"warning: heartbeats cannot be read ({error})", file=sys.stderr, flush=True)

    thread = threading.Thread(target=follow, name="watch", daemon=True)
    if settings.enabled:
        thread.start()
    try:
        yield watcher
    finally:
        over.set()
        if settings.enabled:
            thread.join(_JOIN_S)
        if settings.enabled and not isolated_ray:
            with suppress(Exception):  # the Ray may be what failed, and that has its own sentence
                store.clear()


def _kill_if_here(stop: Stop) -> None:
    """Kill a process on this machine that does not answer; Ray would only ask it to end, which it cannot hear."""
    sign = stop.sign
    if sign is None or not stop.silent or sign.host != os.uname().nodename:
        return
    try:
        if process_start(sign.pid) == sign.started:
            os.kill(sign.pid, signal.SIGKILL)
    except OSError:  # it has ended
        return
