"""Run a command so that no process of it is left afterwards, whatever it starts and however it ends."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from post_training.interrupts import say_at_once
from post_training.masking import Secrets
from post_training.masking.streams import copy_masked
from post_training.processes.descendants import (
    adopt_orphans,
    descendants,
    end_descendants,
    reap_adopted,
    send,
    wait_until,
)

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
# Seconds that a stopped command may take to end by itself, and its remaining processes after it.
_GRACE_S = 20.0
_REMAINING_GRACE_S = 3.0
# Seconds that the rest of their output may take to reach the log; no process is left that could hold it up.
_COPIED_S = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


class Interrupted(Exception):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalFlag:
    """Remembers the signals that ask for an end, instead of raising wherever the program happens to be.

    It acknowledges a signal at once, because the running processes may take a while to end.
    """

    def __init__(self) -> None:
        self.received: list[int] = []

    def _receive(self, number: int, _: object) -> None:
        self.received.append(number)
        first = f"{signal.Signals(number).name}: stopping all processes; send it again to stop waiting"
        sentence = first if len(self.received) == 1 else f"{signal.Signals(number).name} again: no longer waiting"
        say_at_once(sentence)

    def __enter__(self) -> "SignalFlag":
        self._previous = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
            if not _outlives_terminal(number)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _outlives_terminal(number: int) -> bool:
    """Return whether this is SIGHUP, sent by a closing terminal, and `nohup` made this process ignore it."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def run_to_the_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    signals: SignalFlag,
    while_running: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Run a command with its output in ``log`` and return its exit status (negative: the signal that ended it).

    Secrets in the output are masked before they reach the log. ``while_running`` is called a few times a second, and
    once after the end; ``check`` is called only while the command runs, and may end it by raising. The command gets a
    session of its own; when it has ended, failed or been interrupted, all remaining processes that it started are ended
    too. Earlier descendants of this process are left alone.

    Raises:
        Interrupted: a signal in ``signals`` ended the run.
    """
    adopt_orphans()
    earlier = descendants(os.getpid())
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **environment}
    with log.open("ab") as output:
        source, sink = os.pipe()
        try:
            leader = subprocess.Popen(
                command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        finally:
            os.close(sink)
        # Started after the command, which must be forked while this process has no second thread of ours.
        copying = threading.Thread(target=_copy, args=(source, Secrets(variables), output), daemon=True)
        copying.start()
        try:
            while leader.poll() is None and not signals.received:
                while_running()
                check()
                time.sleep(_POLL_S)
        finally:
            _end(leader, signals, earlier)
            copying.join(_COPIED_S)
    while_running()
    if signals.received:
        raise Interrupted(signals.received[0])
    return leader.returncode


def _copy(source: int, secrets: Secrets, log: BinaryIO) -> None:
    """Copy a command's output into its log until all of its processes have closed the pipe."""
    lost = False

    def write(content: bytes) -> None:
        nonlocal lost
        try:
            log.write(content)
            log.flush()
        except (OSError, ValueError) as error:
            # A full disk must not block the command; whoever looks into its end finds the disk full.
            if not lost:
                print(f"warning: the log is incomplete: {error}", file=sys.stderr)
            lost = True

    try:
        copy_masked(source, secrets, write)
    finally:
        os.close(source)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(leader: subprocess.Popen[bytes], signals: SignalFlag, earlier: Collection[int]) -> None:
    """End the command and its remaining processes: first by SIGTERM, then by SIGKILL; a second signal cuts the wait."""
    asked = len(signals.received)
    if leader.poll() is None:
        leader.terminate()
        wait_until(lambda: leader.poll() is not None or len(signals.received) > asked, _GRACE_S)
    for process in _remaining(leader, earlier):
        send(process, signal.SIGTERM)
    wait_until(lambda: not _remaining(leader, earlier), _REMAINING_GRACE_S)
    if leader.poll() is None:
        leader.kill()
        leader.wait(_GRACE_S)
    end_descendants(earlier, 0, _GRACE_S)


def _remaining(leader: subprocess.Popen[bytes], earlier: Collection[int]) -> list[int]:
    """Return the processes of the command that still run, after collecting the exit status of those that ended."""
    leader.poll()
    reap_adopted([leader.pid, *earlier])
    return [process for process in descendants(os.getpid()) if process not in earlier]
