"""Two network namespaces joined by a cable, each of which looks like a separate machine from inside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "cable0"


@dataclass(frozen=True)
class Node:
    """A network namespace with one interface `cable0`."""

    name: str
    address: str

    def command(self, own_folder: str, *line: str) -> list[str]:
        """Return the command line that runs `line` here, with an `own_folder` that the other node does not see."""
        mount = 'mkdir -p "$0" && mount -t tmpfs tmpfs "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "bash", "-c", mount, own_folder, *line]

    def processes(self) -> list[int]:
        """Return the processes in the namespace."""
        return [int(number) for number in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Kill all processes in the namespace."""
        for number in self.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def reason_why_not() -> str:
    """Return why no namespaces can be created here, or "" if they can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    name = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces need privileges that are not here: {made.stderr.strip()}"
    ip("netns", "delete", name)
    return ""


def on_small_disk(folder: Path, size: str, *line: str) -> list[str]:
    """Return the command line that runs `line` with `folder` as a private disk of this size."""
    mount = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    return ["unshare", "--mount", "bash", "-c", mount, str(folder), *line]


def ip(*line: str) -> str:
    """Run the command ip, and return its output. Raises RuntimeError with its message if it fails."""
    done = subprocess.run(["ip", *line], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(line)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Yield two nodes, 10.91.7.1 and 10.91.7.2, that reach each other and nothing else.

    At the end, processes that still run in them are killed, and the nodes are deleted with their cable; nothing else is
    touched.
    """
    mark = uuid.uuid4().hex[:6]
    nodes = Node(f"head-{mark}", "10.91.7.1"), Node(f"worker-{mark}", "10.91.7.2")
    with ExitStack() as made:
        for node in nodes:
            ip("netns", "add", node.name)
            made.callback(ip, "netns", "delete", node.name)
            made.callback(node.kill)
        # The cable is created inside the namespaces, so it is deleted with them.
        first, second = (node.name for node in nodes)
        ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for node in nodes:
            ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", INTERFACE)
            ip("-n", node.name, "link", "set", INTERFACE, "up")
            ip("-n", node.name, "link", "set", "lo", "up")
        yield nodes
