"""`--join` with a Ray that somebody else has started: rejections, and a training that leaves that Ray untouched."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from post_training.ports import reserve_ports
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.scripts.cluster_files import ROOT, write_cluster_file

# Ray treats 127.0.0.1 as another name of this machine's network address.
ADDRESS, SECOND = "127.0.0.2", "127.0.0.3"
PROBLEMS = ROOT / "data" / "arithmetic" / "train.jsonl"
SECONDS_ALLOWED = 900
# Plain Ray, as an operator starts it, without the launcher.
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "NPU_EMULATOR_CAPACITY_MB": "1024",
    "NPU_EMULATOR_DEVICES": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V1": "1",
}


class JoinedRay:
    """A head with one NPU on loopback, and the launcher that joins it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, reserve_ports(ADDRESS)
        self.at = f"{ADDRESS}:{self.port}"
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "NPU_EMULATOR_NODE") if name in os.environ}
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        self.environment = ENVIRONMENT | kept | {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.log = folder / "ray.log"

    @contextmanager
    def node(self, address: str, *options: str, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
        """Run a node of this Ray in its own session while the block lasts; `before` is put before its command."""
        command = [sys.executable, ROOT / "scripts" / "internal" / "start_ray.py", "start", "--block"]
        own = [f"--node-ip-address={address}", '--resources={"NPU": 1}', "--num-cpus=4", *options]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*before, *command, *own], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                for pid in session(process.pid):
                    os.kill(pid, signal.SIGKILL)

    def join(self, *overrides: str, **settings: object) -> tuple[int, str]:
        """Run the launcher with the cluster file's `settings`. Return its exit code and output."""
        data = {name: self.folder / f"{name}.parquet" for name in ("train", "test")}
        cluster = write_cluster_file(
            self.folder / "cluster.env",
            **{
                "SOCKET_IFNAME": "lo",
                "NODES": 1,
                "DIES_PER_NODE": 1,
                "MODEL_PATH": self.folder / "model",
                "TRAIN_FILES": data["train"],
                "TEST_FILES": data["test"],
                "OUTPUT_DIR": self.folder / "output",
                "CANN_ENV": "none",
                "JEMALLOC": "none",
                "NODES_TIMEOUT_S": 240,
                "HEAD_TIMEOUT_S": 60,
                "POLL_S": 0.5,
                **ENVIRONMENT,
                **settings,
            },
        )
        launcher = ["bash", ROOT / "scripts" / "internal" / "launch.sh", "qwen2_5_1_5b_math_one_card"]
        line = [*launcher, "--cluster", cluster, "--join", self.at, "--", "+scale=emulated_qwen2_5", *overrides]
        done = subprocess.run(line, env=self.environment, capture_output=True, text=True, timeout=SECONDS_ALLOWED)
        return done.returncode, done.stdout + done.stderr


def session(leader: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def last_line(said: str) -> str:
    return said.strip().splitlines()[-1]


@contextmanager
def another_version(at: str) -> Iterator[None]:
    """Make the Ray report an older release to whoever connects."""
    from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
    from ray._private.usage.usage_constants import CLUSTER_METADATA_KEY
    from ray._raylet import GcsClient

    client = GcsClient(address=at)
    written = client.internal_kv_get(CLUSTER_METADATA_KEY, KV_NAMESPACE_CLUSTER)
    older = json.dumps(json.loads(written) | {"ray_version": "2.9.3"}).encode()
    client.internal_kv_put(CLUSTER_METADATA_KEY, older, True, KV_NAMESPACE_CLUSTER)
    try:
        yield
    finally:
        client.internal_kv_put(CLUSTER_METADATA_KEY, written, True, KV_NAMESPACE_CLUSTER)


def without_the_overlay() -> tuple[str, ...]:
    """Return a command prefix that hides the checkout's `overlay/`; empty if this machine does not allow that."""
    hide = f"mount -t tmpfs none {ROOT}/overlay"
    tried = subprocess.run(["unshare", "--mount", "bash", "-c", hide], capture_output=True)
    return () if tried.returncode else ("unshare", "--mount", "bash", "-c", f'{hide} && exec "$@"', "_")


@pytest.mark.exhaustive
def test_a_ray_that_runs_is_held_against_this_node_trained_on_and_left_alone(tmp_path):
    request = CheckpointRequest(PROBLEMS, 0, warm_start=None, model_type="qwen2")
    make_checkpoint(request, tmp_path / "model", lambda step, loss: None)
    convert = [sys.executable, ROOT / "scripts" / "json_to_parquet.py", "--output_dir", tmp_path]
    convert += ["--json_path", PROBLEMS, "--test_json_path", PROBLEMS.with_name("test.jsonl")]
    subprocess.run([*convert, "--data_source", "arithmetic"], check=True, capture_output=True)
    ray = JoinedRay(tmp_path)
    options = ("--head", f"--port={ray.port}", "--include-dashboard=false", f"--temp-dir=/tmp/joined-{ray.port}")
    try:
        with ray.node(ADDRESS, *options) as head:
            check_the_join(ray, head)
        assert session(head.pid) == []
    finally:
        shutil.rmtree(f"/tmp/joined-{ray.port}", ignore_errors=True)


def check_the_join(ray: JoinedRay, head: subprocess.Popen[bytes]) -> None:
    """Run the launcher's checks and a training on the running Ray."""
    code, said = ray.join(DIES_PER_NODE=2, NODES_TIMEOUT_S=5)
    assert code == 4 and f"{ADDRESS} has 1 NPUs" in said, said
    assert f"The Ray at {ray.at} does not have 1 nodes with 2 NPUs each within 5 s" in last_line(said)

    with another_version(ray.at):
        code, said = ray.join()
    assert code == 2 and f"{ray.at} runs Ray 2.9.3 with Python" in said and "Traceback" not in said, said
    assert "Node configurations differ" in last_line(said)

    servers = set(session(head.pid))
    reward = f"custom_reward_function.path={ROOT}/verl_patches/utils/reward/rule_reward.py"
    code, said = ray.join("trainer.total_training_steps=2", "trainer.val_before_train=false", reward)
    assert code == 0 and "done; results are in" in said, said[-6000:]
    assert f"1 of 1 nodes with 1 NPUs each are there: {ADDRESS}" in said
    (metrics,) = (ray.folder / "output").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["metrics"]["overlay/patches_ineffective"] == 0 for step in steps)
    assert head.poll() is None and {pid for pid in servers if "raylet" in name(pid) or "gcs" in name(pid)} <= set(
        session(head.pid)
    )
    assert not Path(f"/tmp/ray-{getpass.getuser()}-{ray.port}/r").exists(), "the launcher started no Ray of its own"

    hidden = without_the_overlay()
    if not hidden:
        pytest.skip("NOT RUN, a node without the overlay: no mount namespaces here")
    with ray.node(SECOND, f"--address={ray.at}", before=hidden):
        code, said = ray.join(NODES=2)
    assert code == 2 and "No module named 'overlay.pins'" in said, said
    assert (
        "put the same checkout under the same path on every node" in said
        and "Node configurations differ" in last_line(said)
    )
    assert head.poll() is None


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
