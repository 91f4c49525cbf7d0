"""The template process: import once, then fork a worker for every client that connects.

Modules are imported with the first request, because Ray's core reads its variables when it is imported; they are the
same for every worker of one job on one machine. A driver has no RAY_JOB_ID and RAY_RAYLET_PID. If it makes the first
request, the import gets placeholders, and each worker has Ray read its own values.

Run as ``python -m rehearsal.prefork.template LISTENING_FD CONTROL_FD EXECUTABLE MODULE...``. When the process that
started it closes its end of the control pipe, it waits up to five seconds for its workers, kills the remaining ones and
ends; multiprocessing's resource tracker, for example, ignores SIGTERM. Processes that a worker starts by
multiprocessing's method `spawn` are started as EXECUTABLE, which asks for a fork too.
"""

import fcntl
import gc
import importlib
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass

from rehearsal.prefork import protocol

_STANDARD_ERROR = 2
# Seconds that workers have to end after the process that started the template.
_GRACE_S = 5.0
# For the import of Ray's core. The first job of a Ray that has just started has this ID.
_RAY_PLACEHOLDERS = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}


@dataclass
class _Worker:
    """One forked worker and the client that waits for it."""

    pid: int
    process_descriptor: int
    connection: socket.socket


@dataclass(frozen=True)
class _ChangedVariable:
    """An environment variable that the imports have set; `before` is None if it was not set earlier."""

    before: str | None
    after: str


def _become_worker(request: dict, streams: list[int], set_by_imports: dict[str, _ChangedVariable]) -> None:
    """In the forked child: take over the client's descriptors, directory, environment and command line, then run it.

    A variable that the imports have set keeps their value if the client has the value that they found: imports of the
    worker's own would have set it too.
    """
    _take_over(request["descriptors"], streams)
    os.chdir(request["directory"])
    os.environ.clear()
    environment = request["environment"]
    kept = {name: each.after for name, each in set_by_imports.items() if environment.get(name) == each.before}
    os.environ.update(environment | kept)
    tempfile.tempdir = None  # an import may have cached the template's
    if (core := sys.modules.get("ray._raylet")) is not None:
        core.Config.initialize("")  # reads RAY_* again, RAY_AUTH_MODE among them
    sys.argv = list(request["argv"])
    while sys.argv[0].startswith("-") and sys.argv[0] != "-c":  # a flag of the interpreter, which runs already
        if sys.argv.pop(0) in ("-W", "-X"):
            del sys.argv[0]  # its value
    if sys.argv[0] == "-c":
        _run_text(sys.argv.pop(1))
        return
    script = sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def _take_over(numbers: Sequence[int], descriptors: Sequence[int]) -> None:
    """Give received descriptors the numbers that they have in the client, since a command line may name them.

    Raises:
        OSError: an imported library holds one of the numbers.
    """
    above = max(*numbers, *descriptors) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(numbers, moved, strict=True):
        if number > _STANDARD_ERROR and os.path.exists(f"/proc/self/fd/{number}"):
            raise OSError(f"descriptor {number} of a worker belongs to {os.readlink(f'/proc/self/fd/{number}')}")
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run_text(text: str) -> None:
    """Run a program that was given with -c, as the interpreter would."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.path[0] = ""
    exec(compile(text, "<string>", "exec"), main.__dict__)


class TemplateServer:
    """Serve fork requests on a listening socket until the control pipe closes."""

    def __init__(self, listener: socket.socket, control: int, modules: Sequence[str]):
        self._modules = tuple(modules)
        self._imported = False
        self._set_by_imports: dict[str, _ChangedVariable] = {}
        self._listener = listener
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}
        self._end: float | None = None

    def serve(self) -> None:
        """Fork workers, and report their ends to their clients, until the starter and the workers are gone."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._control, selectors.EVENT_READ, self._close)
        while self._end is None or (self._workers and time.monotonic() < self._end):
            for key, _ in self._selector.select(None if self._end is None else self._end - time.monotonic()):
                key.data(key)
        for worker in self._workers.values():
            signal.pidfd_send_signal(worker.process_descriptor, signal.SIGKILL)

    def _close(self, _: selectors.SelectorKey) -> None:
        """Take no more requests, because the starter went away."""
        self._end = time.monotonic() + _GRACE_S
        self._selector.unregister(self._control)
        self._selector.unregister(self._listener)

    def _accept(self, _: selectors.SelectorKey) -> None:
        connection, _address = self._listener.accept()
        try:
            request, streams = protocol.receive_request(connection)
        except ConnectionError:
            connection.close()
            return
        self._import_once(request["environment"])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # a fork would print again what is buffered
        pid = os.fork()
        if pid == 0:
            self._run_child(connection, request, streams)
        for stream in streams:
            os.close(stream)
        worker = _Worker(pid, os.pidfd_open(pid), connection)
        self._workers[worker.process_descriptor] = worker
        self._selector.register(worker.process_descriptor, selectors.EVENT_READ, self._reap)
        self._selector.register(connection, selectors.EVENT_READ, lambda key: self._client_gone(worker))

    def _import_once(self, environment: dict[str, str]) -> None:
        if self._imported:
            return
        os.environ.update({name: value for name, value in environment.items() if name.startswith("RAY_")})
        placeholders = {name: value for name, value in _RAY_PLACEHOLDERS.items() if name not in os.environ}
        os.environ.update(placeholders)
        before = dict(os.environ)
        gc.disable()  # imports leave little garbage, and searching for it takes a tenth of their time
        for module in self._modules:
            importlib.import_module(module)
        self._set_by_imports = {
            name: _ChangedVariable(before.get(name), value)
            for name, value in os.environ.items()
            if value != before.get(name)
        }
        for name in placeholders:
            del os.environ[name]
        gc.collect()
        gc.freeze()  # keeps the collector from writing to, and so copying, the pages that all workers share
        gc.enable()
        self._imported = True

    def _run_child(self, connection: socket.socket, request: dict, streams: list[int]) -> None:
        """Release the server's descriptors in a forked child, and unwind to the bottom of the stack; never returns."""
        self._selector.close()
        self._listener.close()
        connection.close()
        os.close(self._control)
        for worker in self._workers.values():
            os.close(worker.process_descriptor)
            worker.connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise _BecomeWorker(request, streams, self._set_by_imports)

    def _reap(self, key: selectors.SelectorKey) -> None:
        worker = self._workers.pop(key.fd)
        _, status = os.waitpid(worker.pid, 0)
        self._selector.unregister(worker.process_descriptor)
        os.close(worker.process_descriptor)
        if worker.connection in self._selector.get_map():
            self._selector.unregister(worker.connection)
        try:
            protocol.send_exit_status(worker.connection, os.waitstatus_to_exitcode(status))
        except BrokenPipeError:
            pass  # the client was stopped first; nobody waits for the status
        worker.connection.close()

    def _client_gone(self, worker: _Worker) -> None:
        """End the worker of a client that was stopped, unless it has ended in the same round of events."""
        if worker.process_descriptor not in self._workers:
            return
        self._selector.unregister(worker.connection)
        signal.pidfd_send_signal(worker.process_descriptor, signal.SIGTERM)


class _BecomeWorker(BaseException):
    """Unwinds a forked child out of the server before it runs the worker's script at the bottom of the stack."""

    def __init__(self, request: dict, streams: list[int], set_by_imports: dict[str, _ChangedVariable]):
        super().__init__()
        self.request = request
        self.streams = streams
        self.set_by_imports = set_by_imports


def main(arguments: list[str]) -> int:
    """Serve workers that have the modules named on the command line; in a forked child, run the worker instead."""
    listening, control, executable, *modules = arguments
    del sys.argv[1:]  # not for the modules: MindSpeed makes fields of a configuration out of any argument that it finds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the starter's pipe decides
    multiprocessing.set_executable(executable)
    try:
        TemplateServer(socket.socket(fileno=int(listening)), int(control), modules).serve()
    except _BecomeWorker as fork:
        worker = fork.request, fork.streams, fork.set_by_imports
    else:
        return 0
    _become_worker(*worker)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
