"""Stands for the training: inspects the Ray that the launcher has started, and writes seen.json into its folder.

PROBE in its environment holds address, port and folder as JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.scripts.cluster_files import ROOT, write_cluster_file

SECONDS_FOR_A_JOB = 30


def inodes(process: str) -> set[str]:
    """Return the inodes of the sockets that a process holds."""
    try:
        targets = [os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:
        return set()
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


def listeners(session: int) -> dict[int, str]:
    """Return the ports on which processes of `session` listen beyond loopback, with the program of each."""
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and address != "0100007F":
                listening[fields[9]] = int(port, 16)
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if int(fields[3]) == session:
            for inode in inodes(stat.parent.name) & listening.keys():
                found[listening[inode]] = program(words)
    return found


def program(words: list[str]) -> str:
    """Return the program of a command line: a script, the module after -m, a binary, or `ray` for a worker."""
    if words[0].startswith("ray::"):
        return "ray"
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    modules = [words[index + 1].rpartition(".")[2] for index, word in enumerate(words[:-1]) if word == "-m"]
    return [*scripts, *modules, Path(words[0]).name][0]


def takes_a_job(address: str, port: int, command: str) -> bool:
    """Return whether an HTTP server at the port accepts a shell command to run."""
    body = json.dumps({"entrypoint": command}).encode()
    request = urllib.request.Request(f"http://{address}:{port}/api/job_agent/jobs/", body, method="POST")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def speaks_tls(address: str, port: int, certificates: Path | None) -> str:
    """Return `accepted` if the server at the port talks to a client with these certificates, else `rejected`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificates:
        context.load_cert_chain(certificates / "node.crt", certificates / "node.key")
    try:
        with socket.create_connection((address, port), timeout=5) as plain, context.wrap_socket(plain) as channel:
            return "accepted" if channel.recv(9) else "rejected"
    except OSError:
        return "rejected"


def doctor(address: str, port: int, folder: Path, **changed: object) -> str:
    """Return the doctor's output about the nodes."""
    cluster = write_cluster_file(
        folder / "doctor.env",
        **{
            "MASTER_ADDR": address,
            "SOCKET_IFNAME": "auto",
            "NODES": 1,
            "DIES_PER_NODE": 2,
            "MODEL_PATH": "/no",
            **changed,
        },
    )
    line = [
        sys.executable,
        ROOT / "scripts" / "doctor.py",
        "--cluster",
        cluster,
        "--ray",
        f"{address}:{port}",
        "--no-self-test",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def main() -> None:
    given = json.loads(os.environ["PROBE"])
    address, port, folder = given["address"], given["port"], Path(given["folder"])
    notes = re.findall(
        r"^(\d+) ", next(Path("/tmp").glob(f"ray-*-{port}/{address}.processes")).read_text(), re.MULTILINE
    )
    # The launcher records Ray's process first.
    found = listeners(int(notes[0]))
    mark = folder / "job ran"
    taking = [each for each in found if takes_a_job(address, each, f"touch '{mark}'")]
    deadline = time.monotonic() + SECONDS_FOR_A_JOB
    while taking and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    certificates = folder if (folder / "node.crt").exists() else None
    seen = {
        "listeners": sorted(set(found.values())),
        "takes_jobs": taking,
        "job_ran": mark.exists(),
        "tls": {
            "without a certificate": speaks_tls(address, port, None),
            "with a certificate": speaks_tls(address, port, certificates),
        },
    }
    if given["doctor"]:
        seen["doctor"] = doctor(address, port, folder)
        seen["doctor_that_wants_more"] = doctor(address, port, folder, NODES=2, DIES_PER_NODE=3)
    (folder / "seen.json").write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
