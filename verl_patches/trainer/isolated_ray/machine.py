"""Starts an isolated local Ray and ends all of its processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from post_training.processes.descendants import adopt_orphans, descendants, end_descendants, runs
from post_training.processes.ray_helpers import without_helpers
from verl_patches.trainer.isolated_ray.folder import private_folder
from verl_patches.trainer.isolated_ray.job_servers import without_job_servers

LOOPBACK = "127.0.0.1"
ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",  # torch
    "VLLM_HOST_IP": LOOPBACK,  # vLLM
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray, at import: the address of every process is that of loopback
}
"""Environment variables by which a run's processes listen on loopback alone, with their readers."""
# Seconds that Ray's processes get to end by themselves once Ray was asked to, and to vanish once they were killed.
_GRACE_S = 10.0
_KILL_S = 20.0
_LOOK_S = 2.0
# By default Ray starts a worker for each processor, which nobody needs, and answers the driver once all are there; if
# one is not there within a minute, as on a busy machine, it waits forever. It also gives its workers, which train, a
# niceness of 15, behind every other process of the machine.
_RAY_SETTINGS = {"prestart_worker_first_driver": False, "worker_niceness": 0}


@dataclass
class IsolatedRay:
    """An isolated local Ray.

    Attributes:
        folder: its private folder.
        vital: process ids by name, of the raylet and the GCS server; Ray has ended if one of them has.
    """

    folder: Path
    vital: dict[str, int] = field(default_factory=dict)

    def start(self, **arguments: Any) -> None:
        """Call `ray.init` with `arguments`: on loopback, in the private folder, without helpers and jobs of strangers.

        Raises:
            RuntimeError: Ray has taken an address other than loopback.
        """
        import ray

        with without_job_servers(), without_helpers():
            folder = str(self.folder / "r")
            ray.init(
                address="local", include_dashboard=False, _temp_dir=folder, _system_config=_RAY_SETTINGS, **arguments
            )
        address = ray.util.get_node_ip_address()
        if address != LOOPBACK:
            raise RuntimeError(
                f"Ray uses the address {address} instead of {LOOPBACK}, because it was imported before this was set. "
                "Start the run in a separate process"
            )
        node = ray._private.worker._global_node
        assert node is not None, "ray.init starts one"
        started = node.all_processes
        for name in ("raylet", "gcs_server"):
            self.vital[name] = started[name][0].process.pid

    def describe_end(self) -> str | None:
        """Describe in one sentence that a vital process has gone although nobody ended it; None if all are there."""
        gone = self._gone()
        if not gone:
            return None
        return (
            f"Ray ended during the run: its process {gone} has gone. Was it killed, or did the machine run out of "
            "memory? Start the run again"
        )

    @contextmanager
    def reporting_end(self, report: Callable[[str], None]) -> Iterator[None]:
        """Call `report` with a clause, once, if a vital process goes within this context.

        Workers go on without Ray's server for a while, so the run may finish, but the lines that they print are lost.
        """
        over = threading.Event()
        reported: list[str] = []

        def look() -> None:
            gone = self._gone()
            if gone and not reported:
                reported.append(gone)
                report(f"Ray's process {gone} ended during the run, so the log lacks what workers printed since")

        def follow() -> None:
            while not over.wait(_LOOK_S) and not reported:
                look()

        thread = threading.Thread(target=follow, name="ray-end", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            look()

    def _gone(self) -> str:
        """Return the names of the vital processes that no longer run."""
        return " and ".join(name for name, process in self.vital.items() if not runs(process))


@contextmanager
def isolated_ray(base: str | None = None) -> Iterator[IsolatedRay]:
    """Prepare the surroundings of an isolated local Ray; end every process that was started inside.

    The environment of those processes tells them to use loopback and to put temporary files in the private folder.

    Args:
        base: where to make the private folder; see `private_folder`.
    """
    adopt_orphans()
    earlier = set(descendants(os.getpid()))
    with private_folder("run", base) as folder, _environment(folder):
        try:
            yield IsolatedRay(folder)
        finally:
            with _signals_wait():
                end_descendants(earlier, _GRACE_S, _KILL_S)
            _forget_ray_where_errors_are_shown()


def _forget_ray_where_errors_are_shown() -> None:
    """Restore Python's own excepthook: Ray's first reports an error to its server, and waits a minute if it is gone."""
    worker = sys.modules.get("ray._private.worker")
    if worker is not None and sys.excepthook is worker.custom_excepthook:
        sys.excepthook = worker.normal_excepthook


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    variables = {**ON_LOOPBACK, "TMPDIR": str(folder)}  # the last for Python, and with it vLLM's sockets
    earlier = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    tempfile.tempdir = None  # asks TMPDIR again
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Ignore ending signals, so that a second Ctrl-C does not cut the clean end short, which has its own time limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in ending}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
