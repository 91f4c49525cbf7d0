"""The process in which a reward's algebra runs: one JSON object a line in, one out. Started by judge.py only."""

import ctypes
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable

_MEMORY_LIMIT_BYTES = 4 * 1024**3
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, even in the middle of a computation."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))


def _load_comparison() -> Callable[[str, str], bool]:
    """Imports math-verify; its own time limits are off, because the parent kills this process instead."""
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

    def equal(truth: str, answer: str) -> bool:
        parsed_truth = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
        parsed_answer = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        return bool(verify(parsed_truth, parsed_answer, timeout_seconds=None))

    return equal


def main() -> None:
    """Answers comparisons until standard input ends."""
    # Ctrl-C in a terminal reaches the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    _limit_memory()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # Whatever the algebra system prints must not be taken for a reply.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    equal = _load_comparison()
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            verdict = equal(request["truth"], request["answer"])
        except Exception:  # any failure of the parser means: this is not the right answer
            verdict = False
        print(json.dumps({"equal": verdict}), file=replies)


if __name__ == "__main__":
    main()
