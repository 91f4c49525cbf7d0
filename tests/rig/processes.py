"""Four processes that live as long as the tests need them and run functions that the tests send.

They are started by multiprocessing's fork server, which imports the whole stack once, so that the four processes share
the imports. Nothing here uses Ray or verl's driver.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

RANKS = 4
ANSWER_WITHIN_S = 240
# Software of the vendors reads these; the fork server must have them before it imports anything.
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
    """A job failed; the message holds the rank and its trace."""


class Processes:
    """`RANKS` processes with verl's distributed environment. Use as a context manager."""

    def __enter__(self) -> Processes:
        os.environ.update(VENDOR_ENVIRONMENT)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.rig.preloaded"])
        port = _free_port()
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

    def run(self, job: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Call `job(state, *arguments, **options)` on every rank and return the results by rank.

        An argument of type `ByRank` is replaced by its element for the rank. `job` must be importable.

        Raises:
            RemoteError: a rank raised, ended, or did not answer in `ANSWER_WITHIN_S` seconds.
        """
        for rank, connection in enumerate(self._connections):
            mine = [_for_rank(argument, rank) for argument in arguments]
            connection.send((job, mine, {name: _for_rank(value, rank) for name, value in options.items()}))
        answers = [self._answer(rank, job.__name__) for rank in range(RANKS)]
        failures = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        if failures:
            raise RemoteError("\n".join(failures))
        return [answer for _, answer in answers]

    def _answer(self, rank: int, name: str) -> tuple[bool, Any]:
        connection = self._connections[rank]
        if not connection.poll(ANSWER_WITHIN_S):
            return False, f"{name} gave no answer in {ANSWER_WITHIN_S} s"
        try:
            return connection.recv()
        except EOFError:
            return False, f"the process ended in {name}"


class ByRank(list):
    """One argument for each rank."""


def _for_rank(value: Any, rank: int) -> Any:
    return value[rank] if isinstance(value, ByRank) else value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, port: int, connection: Connection) -> None:
    """Run jobs until the connection closes. `state` is a dict that jobs share."""
    os.environ.update(_distributed_environment(rank, port))
    state: dict[str, Any] = {"rank": rank}
    while True:
        try:
            job, arguments, options = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, job(state, *arguments, **options))
        except BaseException:  # a test wants every failure of a rank as a failure of its own
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
    }
