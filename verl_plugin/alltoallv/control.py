"""Control messages between the training rank and the vLLM worker of one die.

verl's own channel only carries tensors, one way. From the start of its server on, the worker answers on a socket of its
own, named after the training rank on its die; requests are Python objects, as in verl's channel.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from post_training.device_phases import PhaseMemory
from post_training.layouts.layout import RolloutPlacement
from post_training.processes.descendants import runs
from post_training.reshard.handover import HandoverError, Manifest
from verl_plugin.alltoallv.settings import EXTENSION, EXTENSION_KEY, AlltoallvSettings
from verl_plugin.alltoallv.stand_in import StandIn

ANSWER_SECONDS = 60.0
"""A worker answers from a thread of its own, within milliseconds unless its process hangs."""

START_SECONDS = 10.0
"""A server's workers open their sockets before the first update, except where they start late on another node."""

LEAVE_SECONDS = 5.0
"""A worker that waits for a bucket looks twice a second whether the update was given up."""

_POLL_MILLISECONDS = 500
_LEAVE_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Hello:
    """First request of a training rank. `process` is its process ID, by which the worker notices that it has ended."""

    process: int


@dataclass(frozen=True)
class Begin:
    """Announces that an update begins."""

    version: int


@dataclass(frozen=True)
class Abandon:
    """Announces that the training ranks gave an update up."""

    version: int
    reason: str


@dataclass(frozen=True)
class HasLeft:
    """Asks whether the worker has left an update, whether it succeeded or not."""

    version: int


@dataclass(frozen=True)
class TakeMemory:
    """Asks for the device memory of the rollouts since the last such request, by phase."""


@dataclass(frozen=True)
class Description:
    """A worker's answer to `Hello`: the weights that it serves.

    Attributes:
        weights: shape and type of its live weights by local name; experts in the order of the files.
        placement: of all workers of its instance; `instances` is 1.
        settings: of the transfer.
        problem: why the worker cannot take weights, one sentence; empty if it can.
        process: process ID of the worker, by which the training rank notices that it has ended.
        handle: ZeroMQ address of verl's hand-over on this die.
    """

    weights: dict[str, tuple[tuple[int, ...], torch.dtype]]
    placement: RolloutPlacement
    settings: AlltoallvSettings
    problem: str = ""
    process: int = 0
    handle: str = ""


class Control:
    """The worker's end: answers requests in a thread and remembers their contents.

    Attributes:
        manifest: of the updates, once a training rank has planned them.
        version: of the update that began last; 0 before the first.
        greeted: whether a training rank has introduced itself.

    Args:
        path: of the socket.
        description: of the worker.
        memory: returns what a `TakeMemory` asks for; called in the thread.
    """

    def __init__(
        self, path: Path, description: Description, memory: Callable[[], dict[str, PhaseMemory]] = dict
    ) -> None:
        self.manifest: Manifest | None = None
        self.version = 0
        self.greeted = False
        self._description, self._memory = description, memory
        self._trainer: int | None = None
        self._abandoned: Abandon | None = None
        self._settled = 0
        path.unlink(missing_ok=True)
        atexit.register(path.unlink, missing_ok=True)
        socket: Any = zmq.Context.instance().socket(zmq.REP)
        socket.bind(f"ipc://{path}")
        threading.Thread(target=self._serve, args=(socket,), name="alltoallv control", daemon=True).start()

    def check(self) -> None:
        """Raise HandoverError if the update in progress will not be finished."""
        abandoned = self._abandoned
        if abandoned is not None and abandoned.version > self._settled:
            raise HandoverError(f"training abandoned update {abandoned.version}: {abandoned.reason}")
        if self._trainer is not None and not runs(self._trainer):
            raise HandoverError(f"the training process {self._trainer} of this die ended during update {self.version}")

    def settle(self) -> None:
        """Mark the update in progress as over, whether it succeeded or not."""
        self._settled = max(self.version, self._abandoned.version if self._abandoned else 0)

    def _serve(self, socket: Any) -> None:
        while True:
            socket.send_pyobj(self._answer(socket.recv_pyobj()))

    def _answer(self, request: Any) -> Any:
        match request:
            case Hello(process):
                # The ID means nothing if that process is in another PID namespace.
                self._trainer = process if runs(process) else None
                self.greeted = True
                return self._description
            case Manifest():
                self.manifest = request
            case Begin(version):
                self.version = version
            case Abandon():
                self._abandoned = request
            case HasLeft(version):
                return self._settled >= version
            case TakeMemory():
                return self._memory()
        return None


class Inquiry:
    """The training rank's end.

    Raises:
        HandoverError: no worker of this project serves on this rank's die.
    """

    def __init__(self, path: Path) -> None:
        end = time.monotonic() + START_SECONDS
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        if not path.exists():
            raise HandoverError(
                f"{EXTENSION_KEY} is invalid: no vLLM worker on this die takes weights by alltoallv. "
                f"Set it to {EXTENSION}."
            )
        self._socket: Any = zmq.Context.instance().socket(zmq.REQ)
        self._socket.connect(f"ipc://{path}")
        self._process = 0
        self._stand_in: StandIn | None = None

    def ask(self, request: Any) -> Any:
        """Send a request and return its answer.

        Raises:
            HandoverError: the worker has ended, or does not answer within `ANSWER_SECONDS`.
        """
        self.check()
        self._socket.send_pyobj(request)
        end = time.monotonic() + ANSWER_SECONDS
        while not self._socket.poll(_POLL_MILLISECONDS):
            self.check()
            if time.monotonic() > end:
                raise HandoverError(f"the vLLM worker on this die did not answer within {ANSWER_SECONDS:.0f} s")
        return self._socket.recv_pyobj()

    def abandon(self, version: int, reason: str) -> None:
        """Announce that an update was given up, and wait until the worker has left it, `LEAVE_SECONDS` at most.

        verl's sender binds the same address for every update: a worker that still waited there would take the first
        message of the next one for a bucket.

        Raises:
            HandoverError: as `ask`.
        """
        self.ask(Abandon(version, reason))
        end = time.monotonic() + LEAVE_SECONDS
        while not self.ask(HasLeft(version)) and time.monotonic() < end:
            time.sleep(_LEAVE_POLL_SECONDS)

    def check(self) -> None:
        """Raise HandoverError if the worker's process has ended."""
        if self._stand_in is not None and self._stand_in.needed:
            raise HandoverError(
                f"the vLLM worker on this die, process {self._process}, has ended; its last lines in the log say why"
            )

    def greet(self) -> Description:
        """Introduce this process and return the worker's description. From now on a worker that ends is noticed."""
        description = self.ask(Hello(os.getpid()))
        self._process = description.process
        # The ID means nothing if the worker is in another PID namespace.
        if self._stand_in is None and self._process and runs(self._process):
            self._stand_in = StandIn(self._process, description.handle)
        return description
