"""A process of its own that runs functions on its emulated dies when told to.

The processes are forked from multiprocessing's fork server, which has imported torch_npu and touched no device.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["torch_npu", __name__])
ANSWER_WITHIN_SECONDS = 60


class DeviceProcess:
    """Use as a context manager. `environment` is set before the process looks at its devices."""

    def __init__(self, **environment: str):
        self._connection, theirs = _FORK_SERVER.Pipe()
        self._process = _FORK_SERVER.Process(target=_serve, args=(theirs, environment), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        """Return `function(state, *arguments)` from the process; `state` is a dict that lives as long as the process.

        Raises:
            RuntimeError: the function raised, with its trace; or the process gave no answer.
        """
        self.send(function, *arguments)
        return self.receive()

    def send(self, function: Callable, *arguments: Any) -> None:
        """Begin the call; `receive` returns its result."""
        self._connection.send((function, arguments))

    def has_answered(self, within: float) -> bool:
        """Whether the result of a call arrives within this number of seconds."""
        return self._connection.poll(within)

    def receive(self) -> Any:
        if not self._connection.poll(ANSWER_WITHIN_SECONDS):
            raise RuntimeError("no answer")
        fine, answer = self._connection.recv()
        if not fine:
            raise RuntimeError(answer)
        return answer

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        """Let it return from its main function, and wait for that."""
        self._connection.close()
        self._process.join(ANSWER_WITHIN_SECONDS)

    def __enter__(self) -> "DeviceProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self.kill()


def _serve(connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    state: dict = {}
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(state, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
