"""Two network namespaces joined by a cable, each like a machine of its own to what runs in it."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "cable0"


@dataclass(frozen=True)
class Node:
    """A network namespace with one interface `cable0`."""

    name: str
    address: str

    def command(self, own_folder: str, *line: str) -> list[str]:
        """The command line that runs `line` in the namespace, with an `own_folder` that the other node does not see."""
        mount = 'mkdir -p "$0" && mount -t tmpfs tmpfs "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "bash", "-c", mount, own_folder, *line]


def reason_why_not() -> str:
    """Why no namespaces can be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    name = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces need privileges that are not here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes, 10.91.7.1 and 10.91.7.2, that reach each other and nothing else."""
    mark = uuid.uuid4().hex[:6]
    nodes = Node(f"head-{mark}", "10.91.7.1"), Node(f"worker-{mark}", "10.91.7.2")

    def ip(*line: str) -> None:
        subprocess.run(["ip", *line], check=True, capture_output=True)

    try:
        for node in nodes:
            ip("netns", "add", node.name)
        ends = [f"c{mark}{side}" for side in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for node, end in zip(nodes, ends, strict=True):
            ip("link", "set", end, "netns", node.name)
            ip("-n", node.name, "link", "set", end, "name", INTERFACE)
            ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", INTERFACE)
            ip("-n", node.name, "link", "set", INTERFACE, "up")
            ip("-n", node.name, "link", "set", "lo", "up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node.name], capture_output=True)
