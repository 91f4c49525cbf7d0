"""Answers verl's sender of weights in place of a vLLM worker that has ended.

After each bucket verl 0.9.1's sender waits for the worker's answer without a limit (verl's pull request 7366, open).
The training rank on a dead worker's die would wait forever, and all others for it in their next collective. Answered,
it reaches the end of the update, where the ranks tell each other who failed. verl creates the sender itself and takes
no class for it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq

from post_training.processes.descendants import runs

_LOOK_SECONDS = 0.5
_ANSWER_MILLISECONDS = 100
_SENDER = b"sender"


class StandIn:
    """Waits, in a thread, for the end of a worker's process; from then on answers every bucket.

    Args:
        process: of the worker, in this process's PID namespace.
        handle: ZeroMQ address that verl's sender binds.
    """

    def __init__(self, process: int, handle: str) -> None:
        self._process, self._handle = process, handle
        threading.Thread(target=self._watch, name="alltoallv stand-in", daemon=True).start()

    @property
    def needed(self) -> bool:
        """Whether the worker's process has ended."""
        return not runs(self._process)

    def _watch(self) -> None:
        while not self.needed:
            time.sleep(_LOOK_SECONDS)
        self._answer()

    def _answer(self) -> None:
        """Answer what arrives; and, unasked, a bucket that was sent to the worker, which no other socket receives.

        A REQ socket whose peer is gone takes the answer from any other, and drops answers without a question.
        """
        socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.CONNECT_ROUTING_ID, _SENDER)
        socket.connect(self._handle)
        while True:
            if socket.poll(_ANSWER_MILLISECONDS):
                socket.recv_multipart()
            socket.send_multipart([_SENDER, b"", b""])
