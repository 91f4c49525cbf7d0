"""Acknowledge Ctrl-C at once, because stopping the running processes may take a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def say_at_once(sentence: str) -> None:
    """Write a line to the terminal from a signal handler.

    It does not use print, because the signal may arrive while a stream is being written.
    """
    with suppress(OSError):
        os.write(2, f"\n{sentence}\n".encode())


@contextmanager
def acknowledged(sentence: str, numbers: tuple[signal.Signals, ...] = (signal.SIGINT,)) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at a signal, after `sentence` is written; yield the list of the received signals.

    A signal that this process ignores, as under `nohup`, stays ignored. Forked children print nothing.
    """
    received: list[int] = []
    own = os.getpid()

    def interrupt(number: int, _: object) -> None:
        if not received and os.getpid() == own:
            say_at_once(sentence)
        received.append(number)
        raise KeyboardInterrupt

    ending = [each for each in numbers if signal.getsignal(each) != signal.SIG_IGN]
    previous = {each: signal.signal(each, interrupt) for each in ending}
    try:
        yield received
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
