"""Two Ray nodes in separate network namespaces train through the launcher as two machines would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest

from post_training.processes.descendants import wait_until
from post_training.report.metrics import read_entries
from post_training.report.run_folder import read_configuration
from rehearsal.emulated_dies import remove_emulated_dies
from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.resume_proof.comparison import compare
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.scripts.cluster_files import ROOT, lines_of_a_first_step, write_cluster_file
from tests.scripts.namespaces import INTERFACE, Node, ip, reason_why_not, two_nodes
from verl_patches.features.training_checkpoint.step_folders import newest_step

LAUNCHER = ROOT / "scripts" / "train_deepseekv3_256die_random_init.sh"
SECONDS_ALLOWED = 900
CHECKPOINTS = "trainer.default_local_dir"


def cluster_file(folder: Path, checkpoint: Path, data: Path, **others: object) -> Path:
    """Write the settings of a cluster of two emulated nodes, with four dies each unless others are given."""
    settings = dict(
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
        # Otherwise a worker's Ray gives up on an ended head only after a minute.
        RAY_gcs_rpc_server_reconnect_timeout_s=5,
    )
    return write_cluster_file(folder / "cluster.env", **settings | others)


def start(node: Node, line: Sequence[str], said: TextIO) -> subprocess.Popen[bytes]:
    """Run a command as if somebody started it on this machine."""
    # The user's shell must not matter, as the file describes the cluster. A node has its own dies.
    environment = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    environment |= {"NPU_EMULATOR_NODE": node.name}
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return subprocess.Popen(
        node.command("/tmp/ray-root-6379", *line),
        cwd=ROOT,
        env=environment,
        # Not a pipe: nobody reads one node's pipe while waiting for the other node.
        stdout=said,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    reason = reason_why_not()
    if reason:
        pytest.skip(f"NOT RUN, two nodes: {reason}")
    with two_nodes() as pair:
        yield pair
    for node in pair:
        remove_emulated_dies(node.name)


def train(nodes: Sequence[Node], line: Sequence[str], folder: Path) -> list[str]:
    """Run a command on both nodes; it must succeed and leave nothing. Return each node's output."""
    with ExitStack() as files:
        running = [start(node, line, files.enter_context((folder / node.address).open("w"))) for node in nodes]
        for process in running:
            process.wait(SECONDS_ALLOWED)
    said = [(folder / node.address).read_text() for node in nodes]
    assert [process.returncode for process in running] == [0, 0], said[0][-6000:] + said[1][-3000:]
    assert [node.processes() for node in nodes] == [[], []]
    return said


@pytest.mark.exhaustive
def test_two_nodes_train_through_the_launcher(nodes, inputs, tmp_path):
    cluster = cluster_file(tmp_path, *inputs)
    line = ["bash", str(LAUNCHER), "--cluster", str(cluster), "--", "+scale=emulated_8_dies", "+graph=off"]
    line.append("actor_rollout_ref.overlay.measure.verify_weights=true")
    said = train(nodes, line, tmp_path)
    assert "2 of 2 nodes with 4 NPUs each are there: 10.91.7.1, 10.91.7.2" in said[0]
    assert "giving 4 dies to the head at 10.91.7.1:6379" in said[1] and "the head has ended the job" in said[1]
    # Whether the head must wait for the worker depends on timing.
    unseen = {pattern.pattern for pattern in lines_of_a_first_step() if not pattern.search(said[0])}
    assert unseen <= {"nodes.*after"}
    (metrics,) = (tmp_path / "output with space").glob("*/metrics.jsonl")
    steps = [json.loads(text) for text in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["metrics"]["reshard/weights_exact"] == 1 for step in steps)
    assert all(step["metrics"]["overlay/patches_ineffective"] == 0 for step in steps)


# Somebody else's server on the port of Ray's head; prints when it is ready.
TAKES_THE_PORT = """
import socket, sys
server = socket.create_server(("10.91.7.1", 6379))
print("taken", flush=True)
while True:
    server.accept()
"""


# A job of two dies that can be resumed after every step.
STEPS = 3
# Enough steps for a node to return while the other one trains alone.
ELASTIC_STEPS = 16
SMALL_JOB = (
    "+scale=emulated_qwen2_5", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=-1",
    "trainer.val_before_train=false", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)  # fmt: skip


def small_job(folder: Path, data: Path) -> list[str]:
    """Return the command line, without its output, of a job on two single-die nodes, with its files in `folder`."""
    request = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, warm_start=None, model_type="qwen2")
    model = make_checkpoint(request, folder / "model", lambda step, loss: None).path
    one_die = {"DIES_PER_NODE": 1, "NPU_EMULATOR_DEVICES": 1, "NPU_EMULATOR_CAPACITY_MB": 1024}
    cluster = cluster_file(folder, model, data, **one_die, NODES_TIMEOUT_S=400, HEAD_TIMEOUT_S=400)
    launcher = str(ROOT / "scripts" / "internal" / "launch.sh")
    return ["bash", launcher, "qwen2_5_0_5b_gsm8k", "--cluster", str(cluster), "--", *SMALL_JOB]


def writing_to(output: Path) -> list[str]:
    return [f"actor_rollout_ref.overlay.measure.output_dir={output}", f"{CHECKPOINTS}={output}/checkpoints"]


@pytest.mark.exhaustive("trains three times")
@pytest.mark.timeout(3000)
def test_supervised_nodes_outlive_a_taken_port_and_a_machine_that_loses_power(nodes, inputs, tmp_path):
    """Both failures are reported, and the training ends bit-identical to an undisturbed one."""
    head, worker = nodes
    output, policy, job = tmp_path / "run", tmp_path / "policy.yaml", small_job(tmp_path, inputs[1])
    policy.write_text("retry_options: {interval_seconds: 1}\n")
    line = [sys.executable, "scripts/supervise.py", "--policy", str(policy), "--output", str(output), "--"]
    line += [*job, *writing_to(output)]
    with ExitStack() as files:
        logs = [files.enter_context((tmp_path / name).open("w")) for name in ("head", "worker", "worker again")]

        def until(what: Callable[[], bool]) -> None:
            happened = wait_until(lambda: leading.poll() is not None or what(), SECONDS_ALLOWED)
            assert happened and leading.poll() is None, (tmp_path / "head").read_text()[-6000:]

        with subprocess.Popen(
            ["ip", "netns", "exec", head.name, sys.executable, "-c", TAKES_THE_PORT], stdout=subprocess.PIPE
        ) as other:
            assert other.stdout.readline() == b"taken\n"
            leading = start(head, line, logs[0])
            until(lambda: len(causes(output)) == 1)
            other.kill()
        following = start(worker, line, logs[1])
        until(lambda: (output / "checkpoints" / "global_step_1").is_dir())
        ip("-n", worker.name, "link", "set", INTERFACE, "down")
        worker.kill()
        following.wait(60)
        remove_emulated_dies(worker.name)
        ip("-n", worker.name, "link", "set", INTERFACE, "up")
        until(lambda: len(causes(output)) == 2)
        again = start(worker, line, logs[2])
        for process in (leading, again):
            process.wait(SECONDS_ALLOWED)
    said = [(tmp_path / name).read_text() for name in ("head", "worker again")]
    assert [leading.returncode, again.returncode] == [0, 0], said[0][-6000:] + said[1][-3000:]
    assert causes(output) == ["network_error", "ray_died"], said[0][-6000:]
    assert "10.91.7.1:6379 is taken by root" in said[0]
    (went_on,) = re.findall(r"again in 1 s from the checkpoint of step (\d)", said[0])
    assert "the head's supervisor ended the training with 0" in said[1]
    assert [node.processes() for node in nodes] == [[], []]
    steps = [record["step"] for record in read_entries(output / "metrics.jsonl")]
    assert int(went_on) >= 1 and steps == list(range(1, STEPS + 1))
    unbroken = tmp_path / "unbroken"
    train(nodes, [*job, *writing_to(unbroken)], tmp_path)
    compared = compare(unbroken, output, STEPS)
    assert compared.differing == () and compared.steps == STEPS, compared


@pytest.mark.exhaustive("trains three times")
@pytest.mark.timeout(3000)
def test_elastic_training_continues_without_a_node_and_returns(nodes, inputs, tmp_path):
    """The worker loses power and does not return within the wait; it returns while the other node trains."""
    head, worker = nodes
    output, policy = tmp_path / "run", tmp_path / "policy.yaml"
    policy.write_text("retry_options: {interval_seconds: 1}\n")
    line = [sys.executable, "scripts/supervise.py", "--policy", str(policy), "--output", str(output), "--elastic"]
    line += ["--wait-for-nodes", "5", "--look-for-nodes", "1", "--", *small_job(tmp_path, inputs[1])]
    line += [f"trainer.total_training_steps={ELASTIC_STEPS}", *writing_to(output)]
    with ExitStack() as files:
        logs = [files.enter_context((tmp_path / name).open("w")) for name in ("head", "worker", "worker again")]

        def until(what: Callable[[], bool]) -> None:
            happened = wait_until(lambda: leading.poll() is not None or what(), SECONDS_ALLOWED)
            assert happened and leading.poll() is None, (tmp_path / "head").read_text()[-6000:]

        following = start(worker, line, logs[1])
        # A node counts as present once its supervisor is running.
        assert wait_until(lambda: list(output.glob(".supervise-*.owner.1")) != [], SECONDS_ALLOWED)
        leading = start(head, line, logs[0])
        until(lambda: (output / "checkpoints" / "global_step_1").is_dir())
        ip("-n", worker.name, "link", "set", INTERFACE, "down")
        worker.kill()
        following.wait(60)
        remove_emulated_dies(worker.name)
        ip("-n", worker.name, "link", "set", INTERFACE, "up")
        until(lambda: len(starts(output)) == 2)
        alone = starts(output)[1]["from_step"]
        until(lambda: newest_step(output / "checkpoints")[0] > alone)
        again = start(worker, line, logs[2])
        for process in (leading, again):
            process.wait(SECONDS_ALLOWED)
    said = [(tmp_path / name).read_text() for name in ("head", "worker again")]
    assert [leading.returncode, again.returncode] == [0, 0], said[0][-6000:] + said[1][-3000:]
    # The head's collective may notice before Ray does.
    assert causes(output) in (["ray_died"], ["operator_error"]), said[0][-6000:]
    assert [(each["nodes"], each["layout"]) for each in starts(output)] == [
        (2, "as configured"),
        (1, "FSDP over 1 dies, rollout 1 x TP1"),
        (2, "as configured"),
    ]
    first, second, third = (each["from_step"] for each in starts(output))
    assert 0 == first < second < third < ELASTIC_STEPS
    assert "2 of 2 nodes are there: the training goes back to 2 at its next checkpoint" in said[0]
    assert "the head's supervisor ended the training with 0" in said[1]
    assert [node.processes() for node in nodes] == [[], []]
    records = read_entries(output / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, ELASTIC_STEPS + 1))
    assert read_configuration(output)["trainer"]["nnodes"] == 2


def starts(output: Path) -> list[dict]:
    """Return the head's starts from its supervisor's record: their nodes, layout and first step."""
    return [entry for entry in read_entries(output / "supervision.jsonl") if "of_nodes" in entry]


def causes(output: Path) -> list[str]:
    """Return the causes of failed starts from the head's supervision record."""
    entries = read_entries(output / "supervision.jsonl")
    return [entry["cause"] for entry in entries if "cause" in entry]
