"""Comparing two mathematical answers by algebra, in a process that can be killed.

Computer algebra on a model's output may run without end (and some of it holds on to signals), so a time limit inside
the same process is no limit. The worker process is killed when the limit is over, and replaced.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_PROJECT_ROOT = Path(__file__).resolve().parents[3]
# Importing the algebra system takes some seconds on a busy machine, and is not part of a sample's time.
_START_LIMIT_S = 120.0


@dataclass(frozen=True)
class Verdict:
    """What the judge found: ``equal`` (False when undecided), and whether the time limit ended the comparison."""

    equal: bool
    timed_out: bool = False


class Judge:
    """Compares answers with math-verify in a worker process; safe to share between threads.

    Args:
        time_limit_s: seconds that one comparison may take, after the worker is up.
        command: what starts the worker; replaced in tests.
    """

    def __init__(self, time_limit_s: float = 5.0, command: list[str] | None = None) -> None:
        if time_limit_s <= 0:
            raise ValueError(f"The time limit of the reward is {time_limit_s} s; it must be above 0.")
        self.time_limit_s = time_limit_s
        self.timeouts = 0
        self._command = command or [sys.executable, "-m", "verl_patches.features.reward.worker"]
        self._worker: subprocess.Popen[bytes] | None = None
        self._worker_is_ready = False
        self._lock = threading.Lock()

    def equal(self, truth: str, answer: str) -> Verdict:
        r"""Says whether ``answer`` equals ``truth`` (LaTeX or plain text, without ``\boxed``)."""
        with self._lock:
            worker = self._running_worker()
            worker.stdin.write(json.dumps({"truth": truth, "answer": answer}).encode() + b"\n")
            worker.stdin.flush()
            reply = self._read_line(worker, self.time_limit_s)
            if reply is None:
                self.timeouts += 1
                self._stop()
                return Verdict(equal=False, timed_out=True)
            if not reply:
                # The worker died of this sample (out of memory, recursion in C): the answer counts as wrong.
                self._stop()
                return Verdict(equal=False)
            return Verdict(equal=json.loads(reply)["equal"])

    def close(self) -> None:
        """Ends the worker; the next comparison starts a new one."""
        with self._lock:
            self._stop()

    def prepare(self) -> None:
        """Starts the worker without waiting for it, so that the first comparison need not wait for its imports."""
        with self._lock:
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self._stop()
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_PROJECT_ROOT), *_search_path()])}
            self._worker = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
            )
        return self._worker

    def _running_worker(self) -> subprocess.Popen[bytes]:
        worker = self._start()
        if not self._worker_is_ready:
            if not self._read_line(worker, _START_LIMIT_S):
                self._stop()
                raise RuntimeError(f"The reward's worker process did not start: {' '.join(self._command)}")
            self._worker_is_ready = True
        return worker

    def _stop(self) -> None:
        if self._worker is None:
            return
        self._worker.kill()
        self._worker.wait()
        self._worker.stdin.close()
        self._worker.stdout.close()
        self._worker = None
        self._worker_is_ready = False

    @staticmethod
    def _read_line(worker: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
        """Returns a line, b"" when the worker has ended, or None when ``limit_s`` seconds are over."""
        deadline = time.monotonic() + limit_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    return None
                chunk = worker.stdout.read(4096)
                if not chunk:
                    return b""
                line += chunk
        return bytes(line)


def _search_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
