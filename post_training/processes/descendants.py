"""The processes below this one: finding them by descent, and ending them within a bounded time. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own, so that all of them can be found."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(process: int) -> list[int]:
    """Return the running (not zombie) processes below ``process``, parents first."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(parent), []).append(int(entry))
            if state == "Z":
                zombies.add(int(entry))
    found, pending = [], [process]
    while pending:
        below = children.get(pending.pop(0), [])
        pending += below
        found += [child for child in below if child not in zombies]
    return found


def runs(process: int) -> bool:
    """Return whether a process with that pid runs; one that has ended but was not yet reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def reap_adopted(kept: Collection[int] = ()) -> None:
    """Collect the exit status of ended children, except of those in ``kept``."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in map(int, children):
        if child not in kept:
            try:
                os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                continue


def end_descendants(kept: Collection[int], grace_s: float, kill_s: float) -> list[int]:
    """Wait until only ``kept`` run below this process; kill the others after ``grace_s`` seconds.

    Returns the processes that still run ``kill_s`` seconds after they were killed; empty unless the kernel holds them.
    """

    def left() -> list[int]:
        reap_adopted(kept)
        return [process for process in descendants(os.getpid()) if process not in kept]

    wait_until(lambda: not left(), grace_s)
    deadline = time.monotonic() + kill_s
    # A process that is being killed may start another one meanwhile.
    while (remaining := left()) and time.monotonic() < deadline:
        for process in remaining:
            send(process, signal.SIGKILL)
        time.sleep(_POLL_S)
    return remaining


def wait_until(reached: Callable[[], bool], limit_s: float) -> bool:
    """Wait until ``reached`` returns true, at most ``limit_s`` seconds; return whether it did."""
    deadline = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def send(process: int, number: int) -> None:
    """Send a signal, unless the process has gone."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return
