"""Four processes that live as long as the tests need them and run functions that the tests send.

multiprocessing's fork server starts them. It imports the whole stack once, so the four processes share the imports.
Nothing here uses Ray or verl's driver.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from post_training.ports import reserve_ports

RANKS = 4
ANSWER_WITHIN_S = 400
GRACE_S = 10
# The vendors' software reads these, so the fork server must have them before it imports anything.
VENDOR_ENVIRONMENT = {
    "VLLM_USE_V1": "1",
    "VLLM_VERSION": "0.9.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ASCEND_MLA_PA": "1",
    "VLLM_LOGGING_LEVEL": "WARN",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}


class RemoteError(RuntimeError):
    """A job failed; the message has the ranks and their traceback."""


class Processes:
    """`RANKS` processes with verl's distributed environment. Use as a context manager."""

    def __enter__(self) -> Processes:
        os.environ.update(VENDOR_ENVIRONMENT)
        context = multiprocessing.get_context("forkserver")
        # Python has one fork server; if an earlier test started it, it lacks our imports. It is reset again below.
        server = multiprocessing.forkserver._forkserver
        server._stop()
        self._preloaded_before = server._preload_modules
        context.set_forkserver_preload(["tests.worker_processes.preloaded"])
        port = reserve_ports()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        # This fork server also has the test's environment, such as the engine that it asked for.
        multiprocessing.forkserver._forkserver._stop()
        multiprocessing.get_context("forkserver").set_forkserver_preload(self._preloaded_before)

    def run(self, job: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Call `job(state, *arguments, **options)` on every rank and return the results by rank.

        An argument of type `ByRank` is replaced by its element for the rank. `job` must be importable.

        Raises:
            RemoteError: a rank raised, ended, or did not answer in `ANSWER_WITHIN_S` seconds.
        """
        for rank, connection in enumerate(self._connections):
            mine = [_for_rank(argument, rank) for argument in arguments]
            connection.send((job, mine, {name: _for_rank(value, rank) for name, value in options.items()}))
        answers = self._answers(job.__name__)
        failures: dict[str, list[int]] = {}
        for rank, (fine, answer) in sorted(answers.items()):
            if not fine:
                failures.setdefault(answer, []).append(rank)
        if failures:
            raise RemoteError("\n".join(f"ranks {ranks}: {trace}" for trace, ranks in failures.items()))
        return [answers[rank][1] for rank in range(RANKS)]

    def _answers(self, name: str) -> dict[int, tuple[bool, Any]]:
        """Return (succeeded, answer) by rank. After a failure, the others, which may wait for it, get `GRACE_S`."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, f"the process ended in {name}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                answers |= dict.fromkeys(waiting.values(), (False, f"{name} gave no answer in time; stopped"))
                self._stop()
                break
        return answers

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


class ByRank(list):
    """A list with one argument per rank."""


def _for_rank(value: Any, rank: int) -> Any:
    return value[rank] if isinstance(value, ByRank) else value


def _serve(rank: int, port: int, connection: Connection) -> None:
    """Run jobs until the connection closes. `state` is a dict that the jobs share."""
    os.environ.update(_distributed_environment(rank, port))
    state: dict[str, Any] = {"rank": rank}
    while True:
        try:
            job, arguments, options = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, job(state, *arguments, **options))
        except BaseException:  # report any failure of a rank as its answer
            answer = (False, traceback.format_exc())
        connection.send(answer)


def _distributed_environment(rank: int, port: int) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NPU_EMULATOR_NODE": f"workers-{port}",  # a node of dies that nothing else in this test run uses
    }
