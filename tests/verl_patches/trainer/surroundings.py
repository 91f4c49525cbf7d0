"""A place for a run in which all that it opens and leaves is visible: a network namespace with a second interface, and
separate folders for temporary files. A stranger is another user there, who tries everything that is reachable.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.scripts.namespaces import INTERFACE, Node, ip, reason_why_not, two_nodes

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
_LISTENS = "0A"
NOBODY = 65534
# Run by the system's Python as another user: looks for a server that accepts jobs, and into the run's folders. A
# silent port may belong to a server on a busy machine, so all ports are asked at once, with a generous timeout.
STRANGER = """
import concurrent.futures, http.client, json, os, sys, urllib.request
ports, folders, mark = json.loads(sys.argv[1])
took, entered = [], []
def ask(port):
    body = json.dumps({"entrypoint": "touch " + mark}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/job_agent/jobs/", body, method="POST")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            took.append(port)
    except (OSError, http.client.HTTPException):
        pass
with concurrent.futures.ThreadPoolExecutor(len(ports) + 1) as pool:
    list(pool.map(ask, ports))
for folder in folders:
    for action in (os.listdir, lambda folder: os.listdir(folder + "/logs"), lambda folder: open(folder + "/new", "w")):
        try:
            action(folder)
            entered.append(folder)
        except OSError:
            pass
print(json.dumps({"took": took, "entered": sorted(set(entered))}))
"""


@dataclass
class Surroundings:
    """The place in which a run is watched. `node` is None if no network namespace can be created; see `reason`."""

    temporary: Path
    node: Node | None
    reason: str = ""
    emulated_node: str = ""
    listened: set[tuple[str, int]] = field(default_factory=set)
    ray_folders: set[Path] = field(default_factory=set)
    shared_memory: set[str] = field(default_factory=set)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the run."""
        return {"TMPDIR": str(self.temporary), "NPU_EMULATOR_NODE": self.emulated_node}

    def command(self, line: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Return the command line that runs `line` in this place."""
        inside = ["ip", "netns", "exec", self.node.name] if self.node else []
        return [*inside, *map(str, line)]

    def look(self) -> None:
        """Record what is open now."""
        if self.node:
            self.listened |= listeners(self.node)
        self.ray_folders = self.ray_folders or set(self.temporary.rglob("session_20*"))
        self.shared_memory |= set(self.left_in_memory())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record what is open several times a second while the block lasts."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.2):
                self.look()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def left(self) -> list[str]:
        """Return temporary files and shared memory that the run left, and processes in the namespace."""
        files = [str(path) for path in self.temporary.iterdir()]
        return (
            files + self.left_in_memory() + [f"process {each}" for each in (self.node.processes() if self.node else [])]
        )

    def left_in_memory(self) -> list[str]:
        """Return the entries of /dev/shm that carry the run's names."""
        marks = (f"psm_tmp-{self.temporary.name}", self.emulated_node)
        return [name for name in os.listdir("/dev/shm") if any(mark in name for mark in marks)]

    def beyond_loopback(self) -> list[tuple[str, int]]:
        """Return the addresses and ports, as the kernel prints them, to which other machines could connect."""
        return sorted((address, port) for address, port in self.listened if address not in LOOPBACK)

    def stranger(self, mark: Path) -> dict[str, list]:
        """Attack the recorded ports and folders as another user. Return the jobs accepted and the folders entered."""
        ports, folders = sorted({port for _, port in self.listened}), sorted(map(str, self.ray_folders))
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        line = [*user, "/usr/bin/python3", "-c", STRANGER, json.dumps([ports, folders, str(mark)])]
        done = subprocess.run(self.command(line), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def listeners(node: Node) -> set[tuple[str, int]]:
    """Return address and port of every listening TCP socket in the namespace, from the kernel's tables."""
    lines: list[str] = []
    for process in node.processes()[:1]:
        for table in ("tcp", "tcp6"):
            try:
                lines += Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
            except OSError:
                continue
    fields = [line.split() for line in lines]
    found = [entry[1].split(":") for entry in fields if entry[3] == _LISTENS]
    return {(address, int(port, 16)) for address, port in found}


@contextmanager
def surroundings() -> Iterator[Surroundings]:
    """Yield a place for one run; if no namespace can be created, `reason` says why."""
    with ExitStack() as made:
        # A short path, because sockets lie in it; open to others, like /tmp.
        temporary = Path(
            made.enter_context(tempfile.TemporaryDirectory(prefix="s", dir="/tmp", ignore_cleanup_errors=True))
        )
        temporary.chmod(0o1777)
        reason = reason_why_not() or ("" if shutil.which("setpriv") else "the command setpriv is not installed")
        node = None
        if not reason:
            node, _ = made.enter_context(two_nodes())
            # A default route, as on a networked machine: programs choose the address that they announce by it.
            ip("-n", node.name, "route", "add", "default", "via", "10.91.7.2", "dev", INTERFACE)
        yield Surroundings(temporary, node, reason, f"node-{temporary.name}")
