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
        client = Path(__file__).with_name("client.py")
        return shlex.join([sys.executable, "-I", "-S", str(client), str(self.socket_path)])

    def close(self, timeout_s: float = 10.0) -> None:
        """End the template and remove its socket; it is killed when it has not ended after ``timeout_s`` seconds."""
        os.close(self.control)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket_path.unlink(missing_ok=True)
        self.socket_path.parent.rmdir()


def start_template(modules: Sequence[str]) -> Template:
    """Start a template that will import ``modules``, in order, when the first worker is asked for; returns at once.

    Submit a trivial Ray task right after ``ray.init`` to have the imports run beside the driver's own.

    Raises:
        PreforkError: a real NPU driver is on this machine, where forking after import is not safe.
    """
    if NPU_DRIVER.exists():
        raise PreforkError(
            f"workers are forked on machines without an NPU only, and {NPU_DRIVER} exists here; start the training "
            "with python -m verl_patches.trainer.main_ppo"
        )
    folder = Path(tempfile.mkdtemp(prefix="prefork-"))
    path = folder / "template.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    control_read, control_write = os.pipe()
    command = [sys.executable, "-m", "rehearsal.prefork.template"]
    process = subprocess.Popen(
        [*command, str(listener.fileno()), str(control_read), *modules],
        pass_fds=(listener.fileno(), control_read),
    )
    listener.close()
    os.close(control_read)
    return Template(process, path, control_write)
