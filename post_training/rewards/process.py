"""The client of worker.py: processes that run one comparison each at a time, with a time limit enforced by killing."""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
# Importing the algebra system takes some seconds on a busy machine, and does not count as a sample's time.
_START_LIMIT_S = 120.0
# Part of a sample's limit reserved for ending it, so that it ends in time on a busy machine too.
_RESERVE = 0.1
# Each holds the algebra system, some 100 MiB, and may grow to the memory limit of worker.py.
MOST_WORKERS = 8
_WORKER = [sys.executable, "-m", "post_training.rewards.worker"]


class ComparisonTimeout(Exception):
    """The comparison was ended because its time was over."""


class ComparisonLost(Exception):
    """The comparison ended its process: out of memory, a stack overflow in C."""


class WorkerError(RuntimeError):
    """No process for comparisons can be started, so no answer could be judged."""


class AlgebraProcess:
    """Compares answers in another process; safe to share between threads.

    The process starts with `prepare` or the first comparison. A process forked from this one starts its own.

    Args:
        command: what starts the worker; replaced in tests.
    """

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or _WORKER
        self._process: subprocess.Popen[bytes] | None = None
        self._awaited: list[str] = []
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start the process without waiting for it, so that the first comparison need not wait for its imports."""
        with self._lock:
            self._start()

    def equal(self, truth: str, answer: str, limit_s: float) -> bool:
        r"""Return whether two answers (LaTeX or plain text, without ``\boxed``) are equal.

        Raises:
            ComparisonTimeout: it took longer than ``limit_s`` seconds.
            ComparisonLost: the comparison ended its process.
            WorkerError: the process cannot be started.
        """
        with self._lock:
            self._settle()
            reply = self._ask(json.dumps({"truth": truth, "answer": answer}).encode() + b"\n", limit_s)
            if reply is not None and "equal" in reply:
                return reply["equal"]
            self._have_evaluator_replaced()
            raise ComparisonTimeout if reply is None else ComparisonLost

    def close(self) -> None:
        """End the process; the next comparison starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        # In a process forked from this one, poll() reports the parent's worker as ended: it is not a child there.
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_PROJECT_ROOT), *_search_path()])}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        self._awaited = ["ready"]

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Pipes of the running process, for requests and for replies."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        return process.stdin, process.stdout

    def _settle(self) -> None:
        """Wait until an evaluator is ready, and drop pending replies of an earlier one."""
        self._start()
        if self._hear_awaited():
            return
        # The process ended while its evaluator was replaced.
        self._stop()
        self._start()
        if not self._hear_awaited():
            self._stop()
            raise WorkerError(f"The reward's worker process did not start: {' '.join(self._command)}")

    def _hear_awaited(self) -> bool:
        while self._awaited:
            reply = self._read(_START_LIMIT_S)
            if not reply:
                return False
            if self._awaited[0] in reply:
                del self._awaited[0]
        return True

    def _ask(self, request: bytes, limit_s: float) -> dict[str, bool] | None:
        try:
            self._pipes[0].write(request)
        except BrokenPipeError:
            return {}
        return self._read(limit_s * (1 - _RESERVE))

    def _have_evaluator_replaced(self) -> None:
        """Request a new evaluator without waiting for it; the next comparison does."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            self._awaited = ["killed", "ready"]

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._process = None

    def _read(self, limit_s: float) -> dict[str, bool] | None:
        """Return a reply, {} if the process has ended, or None after ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        line, replies = bytearray(), self._pipes[1]
        with selectors.DefaultSelector() as selector:
            selector.register(replies, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    return None
                # Byte by byte: the pipe may hold two replies, and the second belongs to the next call.
                byte = replies.read(1)
                if not byte:
                    return {}
                line += byte
        return json.loads(line)


class AlgebraPool:
    """Compares answers in up to `size` processes at the same time; safe to share between threads.

    A process starts with `prepare`, or when all others are busy. All end with this process, like any `AlgebraProcess`.

    Args:
        size: the most processes; None stands for one per core that this process may use, and `MOST_WORKERS` at most.
        command: what starts a worker; replaced in tests.
    """

    def __init__(self, size: int | None = None, command: list[str] | None = None) -> None:
        self.size = size or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._command = command
        self._idle: list[AlgebraProcess] = []
        self._all: list[AlgebraProcess] = []
        self._returned = threading.Condition()

    def prepare(self) -> None:
        """Start all processes without waiting for them: a comparison that starts one waits for its imports."""
        taken = [self._take() for _ in range(self.size)]
        try:
            for process in taken:
                process.prepare()
        finally:
            for process in taken:
                self._give_back(process)

    def resize(self, size: int) -> None:
        """Set the most processes; running ones are kept."""
        with self._returned:
            self.size = size
            self._returned.notify_all()

    def equal(self, truth: str, answer: str, limit_s: float) -> bool:
        """Do `AlgebraProcess.equal`, after waiting for an idle process, which does not count towards the limit."""
        process = self._take()
        try:
            return process.equal(truth, answer, limit_s)
        finally:
            self._give_back(process)

    def close(self) -> None:
        """End all processes; the next comparison starts a new one."""
        for process in self._all:
            process.close()

    def _take(self) -> AlgebraProcess:
        with self._returned:
            while not self._idle and len(self._all) >= self.size:
                self._returned.wait()
            if not self._idle:
                self._idle.append(AlgebraProcess(self._command))
                self._all.append(self._idle[0])
            return self._idle.pop()

    def _give_back(self, process: AlgebraProcess) -> None:
        with self._returned:
            self._idle.append(process)
            self._returned.notify()


_shared: dict[int, AlgebraPool] = {}


def shared_pool() -> AlgebraPool:
    """Return the processes that all rewards of this interpreter share; a process forked from it has its own."""
    return _shared.setdefault(os.getpid(), AlgebraPool())


def _search_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
