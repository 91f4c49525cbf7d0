"""Two Ray nodes in network namespaces of their own train through the launcher as two machines would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.scripts.cluster_files import ROOT, lines_of_a_first_step, write_cluster_file
from tests.scripts.namespaces import INTERFACE, reason_why_not, two_nodes

LAUNCHER = ROOT / "scripts" / "train_deepseekv3_256die_random_init.sh"
SECONDS_ALLOWED = 500


def cluster_file(folder: Path, checkpoint: Path, data: Path) -> Path:
    """Settings of a cluster of two emulated nodes with four dies each."""
    return write_cluster_file(
        folder / "cluster.env",
        MASTER_ADDR="10.91.7.1",
        SOCKET_IFNAME=INTERFACE,
        NODES=2,
        DIES_PER_NODE=4,
        MODEL_PATH=checkpoint,
        TRAIN_FILES=data,
        TEST_FILES=data,
        OUTPUT_DIR=folder / "output with space",
        CANN_ENV="none",
        JEMALLOC="none",
        NODES_TIMEOUT_S=120,
        HEAD_TIMEOUT_S=120,
        STOP_TIMEOUT_S=30,
        POLL_S=1,
        NPU_EMULATOR_DEVICES=4,
        NPU_EMULATOR_CAPACITY_MB=256,
        OMP_NUM_THREADS=1,
        VLLM_ASCEND_MLA_PA=1,
        # A worker's Ray gives up on a head that has ended after a minute otherwise.
        RAY_gcs_rpc_server_reconnect_timeout_s=5,
    )


@pytest.mark.exhaustive
def test_two_nodes_train_through_the_launcher(inputs, tmp_path):
    reason = reason_why_not()
    if reason:
        pytest.skip(f"NOT RUN, two nodes: {reason}")
    cluster = cluster_file(tmp_path, *inputs)
    line = ["bash", str(LAUNCHER), "--cluster", str(cluster), "--", "+scale=emulated_8_dies", "+graph=off"]
    line.append("actor_rollout_ref.overlay.measure.verify_weights=true")
    # What the user's shell holds must not decide: the file describes the cluster.
    environment = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    with two_nodes() as nodes, ExitStack() as files:
        running = [
            subprocess.Popen(
                node.command("/tmp/ray-root-6379", *line),
                # A node's dies are its own.
                env=environment | {"NPU_EMULATOR_NODE": node.name},
                # Not a pipe: nobody reads one node's while waiting for the other.
                stdout=files.enter_context((tmp_path / node.address).open("w")),
                stderr=subprocess.STDOUT,
            )
            for node in nodes
        ]
        for process in running:
            process.wait(SECONDS_ALLOWED)
        said = [(tmp_path / node.address).read_text() for node in nodes]
        left = [node.processes() for node in nodes]
    assert [process.returncode for process in running] == [0, 0], said[0][-6000:] + said[1][-3000:]
    assert left == [[], []]
    assert "2 of 2 nodes with 4 NPUs each are there: 10.91.7.1, 10.91.7.2" in said[0]
    assert "giving 4 dies to the head at 10.91.7.1:6379" in said[1] and "the head has ended the job" in said[1]
    # Whether the head has to wait for the worker is a matter of speed.
    unseen = {pattern.pattern for pattern in lines_of_a_first_step() if not pattern.search(said[0])}
    assert unseen <= {"nodes.*after"}
    (metrics,) = (tmp_path / "output with space").glob("*/metrics.jsonl")
    steps = [json.loads(text) for text in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["metrics"]["reshard/weights_exact"] == 1 for step in steps)
    assert all(step["metrics"]["overlay/patches_ineffective"] == 0 for step in steps)
