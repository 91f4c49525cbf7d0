"""Start the template process and describe it to Ray."""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def start_template(modules: Sequence[str], early: Sequence[str] = ()) -> Template:
    """Start a template that will import ``modules``, in order, when the first worker is asked for; returns at once.

    Submit a trivial Ray task right after ``ray.init`` to have the imports run beside the driver's own. ``early`` are
    modules that it imports at once, none of which may import Ray.

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
    command = [sys.executable, "-m", "rehearsal.prefork.template", str(listener.fileno()), str(control_read)]
    process = subprocess.Popen(
        [*command, str(executable), *early, "--", *modules], pass_fds=(listener.fileno(), control_read)
    )
    listener.close()
    os.close(control_read)
    return Template(process, path, control_write)


def _client_command(socket_path: Path) -> str:
    return shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("client.py")), str(socket_path)])
