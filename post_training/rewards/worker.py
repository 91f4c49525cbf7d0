"""The processes in which a reward's algebra runs. Started by process.py only.

The first process imports the algebra system, which takes seconds, and computes nothing after that, so it can always
react. It forks an evaluator, which reads requests and writes replies, one JSON object per line. If an evaluator dies,
or SIGUSR1 reports that its time is over, the first process replaces it, which takes milliseconds.

Replies: {"ready": true} from each new evaluator, {"equal": bool} for a request, {"killed": true} for SIGUSR1.
"""

import ctypes
import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_MEMORY_LIMIT_BYTES = 4 * 1024**3
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
_REQUESTS = 0
_HANDLED = {signal.SIGCHLD, signal.SIGUSR1}

Comparison = Callable[[str, str], bool]


def _load_comparison() -> Comparison:
    logging.disable(logging.WARNING)
    from post_training.rewards.algebra import load_comparison

    return load_comparison()


def _requests() -> Iterator[dict[str, Any]]:
    """Yield requests until the input ends, reading no further than the requested line."""
    pending = b""
    while chunk := os.read(_REQUESTS, 1 << 16):
        pending += chunk
        if pending.endswith(b"\n"):
            yield json.loads(pending)
            pending = b""


def _reply(replies: int, **content: bool) -> None:
    # A short line in a single write: a killed process leaves a whole line or none.
    os.write(replies, json.dumps(content).encode() + b"\n")


def _evaluate(equal: Comparison, replies: int) -> NoReturn:
    """Run an evaluator: answer requests until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    _reply(replies, ready=True)
    for request in _requests():
        try:
            result = equal(request["truth"], request["answer"])
        except Exception:  # any failure of the parser means that the answer is wrong
            result = False
        _reply(replies, equal=result)
    os._exit(0)


def _fork_evaluator(equal: Comparison, replies: int) -> int:
    """Fork a new evaluator and return its pid."""
    evaluator = os.fork()
    if evaluator == 0:
        try:
            _evaluate(equal, replies)
        finally:
            os._exit(1)
    return evaluator


def _discard_input() -> None:
    """Drop the part of a request that the last evaluator has not read."""
    while select.select([_REQUESTS], [], [], 0)[0] and os.read(_REQUESTS, 1 << 16):
        pass


def _end(evaluator: int) -> None:
    os.kill(evaluator, signal.SIGKILL)
    os.waitpid(evaluator, 0)


def main() -> None:
    """Keep an evaluator alive until standard input or the parent process ends."""
    # Ctrl-C in a terminal reaches the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    parent, replies = os.getppid(), os.dup(sys.stdout.fileno())
    # Output of the algebra system must not be mistaken for a reply.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    equal = _load_comparison()
    evaluator = _fork_evaluator(equal, replies)
    # Not PR_SET_PDEATHSIG, which is sent when the thread that started this process ends.
    while os.getppid() == parent:
        event = signal.sigtimedwait(_HANDLED, _PARENT_CHECK_S)
        if event is None:
            continue
        if event.si_signo == signal.SIGUSR1:
            _end(evaluator)
            _discard_input()
            _reply(replies, killed=True)
        else:
            ended, status = os.waitpid(evaluator, os.WNOHANG)
            if not ended:  # the signal was about one that _end has waited for
                continue
            if status == 0:  # the input has ended
                return
        evaluator = _fork_evaluator(equal, replies)
    _end(evaluator)


if __name__ == "__main__":
    main()
