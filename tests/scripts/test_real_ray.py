"""The launcher with a real Ray: what that offers to whoever connects, and the doctor's report about it.

Everything runs on a loopback address. The training is a probe that inspects the Ray around it.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.services import find_bootstrap_address, find_gcs_addresses

from post_training.ports import reserve_ports
from tests.scripts.cluster_files import ROOT, write_cluster_file
from verl_patches.trainer.isolated_ray import python_of_workers

LAUNCHER = ROOT / "scripts" / "train_deepseekv3_256die_true_weight.sh"
ADDRESS = "127.0.0.2"
IP = f"""#!/bin/bash
echo "1: net0    inet {ADDRESS}/24 scope global net0"
"""
# The launcher's own programs run as they are, but the configuration is not checked and the training is a probe.
PYTHON = f"""#!/bin/bash
case "$*" in
    *--check*) exit 0 ;;
    *start_ray.py*) if [[ -n $PLAIN_RAY ]]; then shift; exec ray "$@" $PLAIN_RAY; fi ;;
    *main_ppo*) exec {shlex.quote(sys.executable)} -m tests.scripts.ray_probe ;;
esac
exec {shlex.quote(sys.executable)} "$@"
"""


@pytest.fixture
def port():
    number = reserve_ports(ADDRESS)
    yield number
    shutil.rmtree(f"/tmp/ray-{getpass.getuser()}-{number}", ignore_errors=True)


@pytest.fixture
def launch(tmp_path, port):
    """Return a function that runs the launcher with the probe as its training, and returns what the probe saw."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"ip": IP, "python3": PYTHON}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(plain_ray: str = "", doctor: bool = False, **changed: object) -> dict:
        settings = write_cluster_file(
            tmp_path / "cluster.env",
            **{
                "MASTER_ADDR": ADDRESS,
                "SOCKET_IFNAME": "net0",
                "NODES": 1,
                "DIES_PER_NODE": 2,
                "MODEL_PATH": tmp_path,
                "OUTPUT_DIR": tmp_path / "output",
                "CANN_ENV": "none",
                "JEMALLOC": "none",
                "RAY_PORT": port,
                "HEAD_TIMEOUT_S": 90,
                "NODES_TIMEOUT_S": 90,
                "STOP_TIMEOUT_S": 30,
                "POLL_S": 0.1,
                **changed,
            },
        )
        environment = {name: os.environ[name] for name in ("HOME", "NPU_EMULATOR_NODE") if name in os.environ}
        environment |= {
            "PATH": f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PLAIN_RAY": plain_ray,
            "PROBE": json.dumps({"address": ADDRESS, "port": port, "folder": str(tmp_path), "doctor": doctor}),
        }
        line = ["bash", LAUNCHER, "--cluster", settings]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
        logs = "".join(log.read_text() for log in tmp_path.glob("output/*/ray.log"))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:] + logs[-3000:]
        assert f"1 of 1 nodes with 2 NPUs each are there: {ADDRESS}" in done.stdout
        assert processes_that_mention(f"/tmp/ray-{getpass.getuser()}-{port}/") == []
        return json.loads((tmp_path / "seen.json").read_text())

    return run


def processes_that_mention(text: str) -> list[str]:
    """Return the command lines of living processes that contain `text`."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if text in line]


@pytest.mark.slow
def test_no_server_of_ray_takes_jobs_over_http_and_the_nodes_agree(launch):
    seen = launch(doctor=True)
    assert seen["takes_jobs"] == [] and not seen["job_ran"]
    # Processes of Ray's own protocol, its metrics, and the agent of runtime environments.
    assert set(seen["listeners"]) <= {
        "gcs_server",
        "raylet",
        "agent.py",
        "main.py",
        "monitor.py",
        "dashboard.py",
        "ray",
    }
    assert "gcs_server" in seen["listeners"] and "server" not in seen["listeners"]
    # The columns are as wide as their longest word.
    doctor, wants_more = (re.sub(" +", " ", seen[name]) for name in ("doctor", "doctor_that_wants_more"))
    for line in ("nodes 1 of 1", f"{ADDRESS} NPUs 2 of 2", f"{ADDRESS} pins the same", f"{ADDRESS} overlay the same"):
        assert f"ok {line}" in doctor
    assert f"ok {ADDRESS} clock" in doctor
    assert f"BAD {ADDRESS} NPUs 2 of 3; start Ray there with --resources for 3" in wants_more
    assert "BAD nodes 1 of 2" in wants_more


@pytest.mark.slow
def test_ray_starts_while_a_node_of_the_one_before_still_ends(launch, port):
    """Ray considers every raylet on the machine, and the address that its last start left."""
    folder = Path(f"/tmp/ray-{getpass.getuser()}-{port}", "r")
    folder.mkdir(parents=True, mode=0o700)
    (folder / "ray_current_cluster").write_text(f"{ADDRESS}:{port}")
    waits = ["raylet", "-c", "import sys; sys.stdin.read()", f"--gcs-address={ADDRESS}:{port}"]
    with subprocess.Popen(waits, executable=sys.executable, stdin=subprocess.PIPE) as joined:
        # The control: Ray would follow these.
        assert find_gcs_addresses() >= {f"{ADDRESS}:{port}"}
        assert find_bootstrap_address(str(folder)) == f"{ADDRESS}:{port}"
        launch()
        assert joined.poll() is None
        joined.stdin.close()


@pytest.mark.slow
@pytest.mark.skipif(
    bool(python_of_workers()), reason="NOT RUN: Ray alone starts no worker with a Python at such a path"
)
def test_a_plain_ray_start_would_run_the_job_of_a_stranger(launch):
    """The control of the test above: plain Ray 2.46."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0)), second.bind(("", 0))
        agent, client = first.getsockname()[1], second.getsockname()[1]
    seen = launch(plain_ray=f"--dashboard-agent-listen-port={agent} --ray-client-server-port={client}")
    assert seen["takes_jobs"] == [agent] and seen["job_ran"] and "server" in seen["listeners"]
    # It is not encrypted either, with or without a certificate.
    assert seen["tls"] == {"without a certificate": "rejected", "with a certificate": "rejected"}


@pytest.mark.slow
def test_mutual_tls_keeps_out_whoever_has_no_certificate(launch, tmp_path):
    make_certificates(tmp_path)
    seen = launch(RAY_TLS_DIR=tmp_path)
    assert seen["tls"] == {"without a certificate": "rejected", "with a certificate": "accepted"}


def make_certificates(folder: Path) -> None:
    """Run the commands of docs/cluster.md for one node."""
    guide = (ROOT / "docs" / "cluster.md").read_text()
    commands = [line.strip() for line in guide.splitlines() if line.startswith("    openssl ")]
    assert len(commands) == 3
    for command in commands:
        subprocess.run(["bash", "-c", command.replace("ADDRESS", ADDRESS)], cwd=folder, check=True, capture_output=True)
