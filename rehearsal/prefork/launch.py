"""Start the template process and describe it to Ray."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rehearsal.prefork import protocol

# The program in the template's folder that multiprocessing's method `spawn` starts as a worker.
_EXECUTABLE = "python"
NPU_DRIVER = Path("/dev/davinci_manager")


class PreforkError(RuntimeError):
    """The template process cannot be used on this machine."""


@dataclass
class Template:
    """A running template process; close it after Ray has shut down."""

    process: subprocess.Popen
    socket_path: Path
    control: int

    def run(self, program: str, arguments: Sequence[str]) -> int:
        """Run the source of a program as a fork of the template, with this process's streams, folder and environment.

        Call it from the main thread: SIGINT and SIGTERM of this process reach the program as SIGTERM.

        Returns:
            The program's exit code, 128 + N if signal N ended it.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self.socket_path))

            def hang_up(*_: object) -> None:  # the template ends the fork of a client that does
                connection.shutdown(socket.SHUT_WR)

            before = {number: signal.signal(number, hang_up) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                protocol.send_request(connection, ["-c", program, *arguments], [*range(protocol.STANDARD_STREAMS)])
                return protocol.receive_exit_code(connection)
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    @property
    def py_executable(self) -> str:
        """The value of Ray's ``py_executable`` runtime environment."""
        return _client_command(self.socket_path)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the template and remove its socket; it is killed when it has not ended after ``timeout_s`` seconds."""
        os.close(self.control)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for file in (self.socket_path, self.socket_path.with_name(_EXECUTABLE)):
            file.unlink(missing_ok=True)
        self.socket_path.parent.rmdir()


def start_template(modules: Sequence[str], output: BinaryIO | None = None) -> Template:
    """Start a template that will import ``modules``, in order, when the first fork is asked for; returns at once.

    A driver that is not a fork submits a trivial Ray task right after ``ray.init``, so that the imports run beside its
    own. ``output`` receives the output of the imports, by default this process's streams.

    Raises:
        PreforkError: a real NPU driver is on this machine, where forking after import is not safe.
    """
    if NPU_DRIVER.exists():
        raise PreforkError(
            f"workers are only forked on machines without an NPU, but {NPU_DRIVER} exists here. Start the training "
            "with python -m verl_patches.trainer.main_ppo"
        )
    folder = Path(tempfile.mkdtemp(prefix="prefork-"))
    path = folder / "template.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    control_read, control_write = os.pipe()
    executable = folder / _EXECUTABLE
    executable.write_text(f'#!/bin/sh\nexec {_client_command(path)} "$@"\n')
    executable.chmod(0o700)
    inherited = listener.fileno(), control_read
    command = [sys.executable, "-m", "rehearsal.prefork.template", *map(str, inherited), str(executable), *modules]
    process = subprocess.Popen(command, pass_fds=inherited, stdout=output, stderr=output)
    listener.close()
    os.close(control_read)
    return Template(process, path, control_write)


def _client_command(socket_path: Path) -> str:
    return shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("client.py")), str(socket_path)])


def set_up_workers_quickly() -> None:
    """Have this process start Ray with `setup_worker.py` in place of Ray's, for which Ray has no option."""
    from ray._private import ray_constants  # not before its variables are set

    ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("setup_worker.py"))
