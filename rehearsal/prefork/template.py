"""The template process: import once, then fork a worker for every client that connects.

Modules that need Ray are imported with the first request, because Ray's core reads RAY_JOB_ID and RAY_RAYLET_PID once,
when it is imported; both are the same for every worker of one job on one machine, so the first request's values serve
for all. Modules before ``--`` are imported at once, beside the driver's own imports.

Run as ``python -m rehearsal.prefork.template LISTENING_FD CONTROL_FD EXECUTABLE [MODULE... --] MODULE...``. It ends
when the process that started it closes its end of the control pipe; workers that are still alive belong to Ray and end
with its raylet. Processes that a worker starts by multiprocessing's method `spawn` are started as EXECUTABLE, which
asks for a fork too.
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
import types
from collections.abc import Sequence
from dataclasses import dataclass

from rehearsal.prefork import protocol

_STANDARD_ERROR = 2


@dataclass
class _Worker:
    """One forked worker and the client that waits for it."""

    pid: int
    process_descriptor: int
    connection: socket.socket


def _become_worker(request: dict, streams: list[int], set_by_imports: dict[str, str]) -> None:
    """In the forked child: take over the client's descriptors, directory, environment and command line, then run it.

    Variables that the imports have set stay, unless the client sets them otherwise: a worker that imports for itself
    would have them too.
    """
    _take_over(request["descriptors"], streams)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(set_by_imports | request["environment"])
    sys.argv = list(request["argv"])
    while len(sys.argv[0]) == 2 and sys.argv[0] != "-c":  # a flag of the interpreter, which runs already
        del sys.argv[0]
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


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


class TemplateServer:
    """Serve fork requests on a listening socket until the control pipe closes."""

    def __init__(self, listener: socket.socket, control: int, early: Sequence[str], modules: Sequence[str]):
        self._early = tuple(early)
        self._modules = tuple(modules)
        self._imported = False
        self._set_by_imports: dict[str, str] = {}
        self._listener = listener
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}

    def serve(self) -> None:
        """Fork workers, and report their ends to their clients, until the starter goes away."""
        self._import(self._early)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._control, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._control:
                    return
                key.data(key)

    def _accept(self, _: selectors.SelectorKey) -> None:
        connection, _address = self._listener.accept()
        try:
            request, streams = protocol.receive_request(connection)
        except ConnectionError:
            connection.close()
            return
        self._import_once(request["environment"])
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
        self._import(self._modules)
        gc.freeze()  # keeps the collector from writing to, and so copying, the pages that all workers share
        self._imported = True

    def _import(self, modules: Sequence[str]) -> None:
        before = set(os.environ)
        for module in modules:
            importlib.import_module(module)
        self._set_by_imports |= {name: value for name, value in os.environ.items() if name not in before}

    def _run_child(self, connection: socket.socket, request: dict, streams: list[int]) -> None:
        """Never returns: the child's code ends in ``os._exit`` after the ordinary interpreter shutdown."""
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
        """The process that Ray watches was stopped: its worker must not outlive it."""
        self._selector.unregister(worker.connection)
        signal.pidfd_send_signal(worker.process_descriptor, signal.SIGTERM)


class _BecomeWorker(BaseException):
    """Unwinds a forked child out of the server before it runs the worker's script at the bottom of the stack."""

    def __init__(self, request: dict, streams: list[int], set_by_imports: dict[str, str]):
        super().__init__()
        self.request = request
        self.streams = streams
        self.set_by_imports = set_by_imports


def main(arguments: list[str]) -> int:
    """Serve workers that have the modules named on the command line; in a forked child, run the worker instead."""
    listening, control, executable, *names = arguments
    del sys.argv[1:]  # not for the modules: MindSpeed makes fields of a configuration out of any argument that it finds
    early, modules = (names[: names.index("--")], names[names.index("--") + 1 :]) if "--" in names else ([], names)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the starter's pipe decides
    multiprocessing.set_executable(executable)
    try:
        TemplateServer(socket.socket(fileno=int(listening)), int(control), early, modules).serve()
    except _BecomeWorker as fork:
        worker = fork.request, fork.streams, fork.set_by_imports
    else:
        return 0
    try:
        _become_worker(*worker)
    except SystemExit as end:
        return _exit_code(end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
