"""The launcher of the cluster jobs with stub commands on PATH: its calls, their order, and how it ends."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from post_training.ports import reserve_ports
from tests.scripts.cluster_files import ROOT, SHIPPED, write_cluster_file
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

LAUNCHER = ROOT / "scripts" / "train_deepseekv3_256die_true_weight.sh"
HEAD, WORKER = "127.0.0.2", "127.0.0.3"
# Generous, for a machine that is busy with other things.
SECONDS_ALLOWED = 180
IP = """#!/bin/bash
case "$*" in
    *addr*) echo "1: lo    inet 127.0.0.1/8 scope host lo"; echo "2: net0    inet $NODE_ADDRESS/24 scope global net0" ;;
    *route*) echo "$4 dev net0 src $NODE_ADDRESS" ;;
esac
"""
# Stands for `ray start`: a head listens until it is ended; a worker lasts as long as the head answers.
RAY = """#!/bin/bash
echo "ray $*" >>"$CALLS"
[[ ! -e $TOOLS/ray-fails ]] || { echo "ray broke"; cat "$TOOLS/ray-fails"; exit 1; }
exec "$PYTHON_OF_TESTS" "$TOOLS/ray.py" "$NODE_ADDRESS" "$@"
"""
RAY_PROGRAM = """
import os, signal, socket, sys, time
address, arguments = sys.argv[1], sys.argv[2:]
tools = os.environ["TOOLS"]
def note(what):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(what + "\\n")
def end(*_):
    if os.path.exists(tools + "/ray-lingers"):
        note("lingers")
        while os.path.exists(tools + "/ray-lingers"):
            time.sleep(0.02)
    note("ray ended")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
options = dict(argument.lstrip("-").split("=", 1) for argument in arguments if "=" in argument)
if "--head" in arguments:
    listener = socket.create_server((address, int(options["port"])))
    listener.settimeout(0.05)
    while not os.path.exists(tools + "/ray-dies"):
        try:
            listener.accept()[0].close()
        except TimeoutError:
            pass
    note("ray died")
    sys.exit(9)
host, port = options["address"].rsplit(":", 1)
while not os.path.exists(tools + "/ray-dies"):
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        sys.exit(1)
    time.sleep(0.02)
sys.exit(9)
"""
PYTHON = """#!/bin/bash
printf '%q ' "$@" >>"$TOOLS/arguments"
echo >>"$TOOLS/arguments"
case "$*" in
    *start_ray.py*) shift; exec "$TOOLS/ray" "$@" ;;
    *--check* | *verl_plugin.jobs*)
        echo "check" >>"$CALLS"
        [[ ! -e $TOOLS/reject ]] || { echo "error: 6 dies do not divide" >&2; exit 2; }
        ;;
    *wait_for_nodes*)
        echo "wait" >>"$CALLS"
        [[ ! -e $TOOLS/wait-for-worker ]] || until grep -q "ray start.*--address" "$CALLS"; do sleep 0.02; done
        exit "$(cat "$TOOLS/wait-code" 2>/dev/null || echo 0)"
        ;;
    *main_ppo*)
        hangs=no
        [[ ! -e $TOOLS/train-hangs ]] || hangs=yes
        trap 'echo "training ended" >>"$CALLS"; exit 143' TERM
        printf 'train'  >>"$CALLS"
        printf ' [%s]' "$@" >>"$CALLS"
        echo >>"$CALLS"
        env >"$TOOLS/environment"
        if [[ $hangs == yes ]]; then
            echo "training hangs"
            while :; do sleep 0.05; done
        fi
        if [[ -e $TOOLS/train-ends-ray ]]; then
            touch "$TOOLS/ray-dies"
            until grep -q "ray died" "$CALLS"; do sleep 0.02; done
        fi
        [[ ! -e $TOOLS/train-says ]] || cat "$TOOLS/train-says"
        echo "step 1"
        exit "$(cat "$TOOLS/train-code" 2>/dev/null || echo 0)"
        ;;
    *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


class Machine:
    """One node: a PATH with stubs before the system's commands, and a settings file."""

    launcher, shipped = LAUNCHER, SHIPPED

    def __init__(self, folder: Path, port: int, address: str) -> None:
        self.folder, self.address, self.port = folder, address, port
        self.tools, self.calls_file = folder / "tools", folder / "calls"
        self.extra: dict[str, str] = {}
        self.tools.mkdir()
        for name, text in {"ip": IP, "ray": RAY, "python3": PYTHON}.items():
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)
        (self.tools / "ray.py").write_text(RAY_PROGRAM)
        self.settings: dict[str, object] = {
            "MASTER_ADDR": HEAD,
            "SOCKET_IFNAME": "net0",
            "NODES": 2,
            "DIES_PER_NODE": 4,
            "MODEL_PATH": "/weights",
            "OUTPUT_DIR": folder / "out put",
            "CANN_ENV": "none",
            "JEMALLOC": "none",
            "RAY_PORT": port,
            "HEAD_TIMEOUT_S": 90,
            "NODES_TIMEOUT_S": 20,
            "STOP_TIMEOUT_S": 60,
            "POLL_S": 0.02,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the launcher."""
        return {
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "CALLS": str(self.calls_file),
            "TOOLS": str(self.tools),
            "NODE_ADDRESS": self.address,
            "PYTHON_OF_TESTS": sys.executable,
            **self.extra,
        }

    def start(self, *arguments: str, **changed: object) -> subprocess.Popen:
        """Start the launcher with settings `changed`; it leads a process group, like a job in a terminal."""
        settings = write_cluster_file(self.folder / "cluster.env", self.shipped, **(self.settings | changed))
        return subprocess.Popen(
            ["bash", str(self.launcher), "--cluster", str(settings), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_new_terminal_job,
        )

    def run(self, *arguments: str, **changed: object) -> tuple[int, str]:
        """Run the launcher to its end. Return its exit code and output."""
        process = self.start(*arguments, **changed)
        said = process.communicate(timeout=SECONDS_ALLOWED)[0]
        return process.returncode, said

    def set(self, name: str, value: str = "") -> None:
        """Tell a stub how to behave."""
        (self.tools / name).write_text(value)

    @property
    def calls(self) -> list[str]:
        """The calls to the stubs, first word only."""
        return [" ".join(line.split()[:2]) if line.startswith("ray") else line.split()[0] for line in self.lines]

    @property
    def lines(self) -> list[str]:
        """The lines that the stubs recorded."""
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def wait_for(self, call: str) -> None:
        """Wait until a stub has recorded `call`."""
        deadline = time.monotonic() + SECONDS_ALLOWED
        while call not in self.calls:
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)


def _new_terminal_job() -> None:
    os.setpgrp()
    # Python keeps ignoring SIGINT if it was ignored at its start, as it is below some test harnesses.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def port():
    number = reserve_ports(HEAD)
    yield number
    shutil.rmtree(f"/tmp/ray-{getpass.getuser()}-{number}", ignore_errors=True)


@pytest.fixture
def head(tmp_path, port) -> Machine:
    (tmp_path / "head").mkdir()
    return Machine(tmp_path / "head", port, HEAD)


@pytest.fixture
def worker(tmp_path, port) -> Machine:
    (tmp_path / "worker").mkdir()
    return Machine(tmp_path / "worker", port, WORKER)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HEAD, port)) == 0


def test_the_head_checks_starts_ray_waits_trains_and_stops(head, port):
    code, said = head.run()
    assert code == 0, said
    assert head.calls == ["check", "ray start", "wait", "train", "ray ended"]
    assert "127.0.0.2 is the head" in said and "step 1" in said and "done; results are in" in said
    start = head.lines[1]
    for option in (
        f"--port={port}",
        "--head",
        "--node-ip-address=127.0.0.2",
        '{"NPU": 4}',
        "--include-dashboard=false",
    ):
        assert option in start
    assert not answers(port)
    (log,) = (head.folder / "out put").glob("*/train.log")
    assert "step 1" in log.read_text()


def test_arguments_with_spaces_and_settings_reach_the_training_whole(head, port):
    code, said = head.run("--", "trainer.experiment_name='two words'", "data.seed=7")
    assert code == 0, said
    train = next(line for line in head.lines if line.startswith("train"))
    assert "[trainer.experiment_name='two words'] [data.seed=7]" in train
    assert "[--config-name] [deepseek_v3_256die_true_weight] [trainer.nnodes=2] [trainer.n_gpus_per_node=4]" in train
    assert f"[ray_init.address=127.0.0.2:{port}] [actor_rollout_ref.model.path='/weights']" in train
    environment = (head.tools / "environment").read_text().splitlines()
    for entry in ("VLLM_USE_V1=1", "HCCL_BUFFSIZE=300", "HCCL_SOCKET_IFNAME=net0", "GLOO_SOCKET_IFNAME=net0"):
        assert entry in environment


SHARDED = [f"actor_rollout_ref.{role}.megatron.use_dist_checkpointing=True" for role in ("actor", "ref")]


@pytest.mark.parametrize("given", ["environment", "file"])
def test_dist_ckpt_path_reaches_actor_and_reference(head, tmp_path, given):
    shards = tmp_path / "my shards"
    shards.mkdir()
    changed = {"DIST_CKPT_PATH": shards} if given == "file" else {}
    head.extra |= {"DIST_CKPT_PATH": str(shards) if given == "environment" else "/of/the/shell"}
    code, said = head.run("--dry-run", NODES=16, DIES_PER_NODE=16, **changed)
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if "main_ppo" in line and not line.endswith("--check")]
    words = shlex.split(line)
    assert [word for word in words if "use_dist_checkpointing" in word] == SHARDED
    paths = [word.partition("=")[2] for word in words if "dist_checkpointing_path" in word]
    assert paths == [f"'{shards}'"] * 2
    check_configuration(compose("deepseek_v3_256die_true_weight", words[words.index("--config-name") + 2 :]))


@pytest.mark.parametrize("value", ["none", ""])
def test_no_dist_ckpt_path_reads_the_models_folder(head, value):
    head.extra |= {"DIST_CKPT_PATH": value} if value else {}
    code, said = head.run("--dry-run")
    assert code == 0 and "dist_checkpointing" not in said


def test_missing_dist_ckpt_path_rejected(head):
    head.extra |= {"DIST_CKPT_PATH": "/no/such/shards"}
    code, said = head.run()
    assert code == 2 and head.calls == []
    assert "DIST_CKPT_PATH=/no/such/shards is invalid: no such folder" in said and "Set it to the" in said


def test_a_worker_joins_and_ends_with_the_head(worker, port):
    listener = socket.create_server((HEAD, port))
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    process = worker.start()
    worker.wait_for("ray start")
    assert f"--address=127.0.0.2:{port}" in worker.lines[0] and "--head" not in worker.lines[0]
    _close(listener)
    said = process.communicate(timeout=SECONDS_ALLOWED)[0]
    assert process.returncode == 0, said
    assert "lending 4 dies to the head" in said and "the head has ended the job" in said


def _accept(listener: socket.socket) -> None:
    try:
        while True:
            listener.accept()[0].close()
    except OSError:
        return


def _close(listener: socket.socket) -> None:
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_late_worker_is_waited_for(head, worker):
    head.set("wait-for-worker")
    # Both nodes record into one file, because the head's stub looks for the worker there.
    worker.calls_file = head.calls_file
    leading = head.start()
    head.wait_for("wait")
    assert "train" not in head.calls
    following = worker.start()
    outputs = [process.communicate(timeout=SECONDS_ALLOWED)[0] for process in (leading, following)]
    assert [leading.returncode, following.returncode] == [0, 0], outputs
    assert head.calls[:5] == ["check", "ray start", "wait", "ray start", "train"]


def test_workers_that_never_come_end_the_job_with_four(head, port):
    head.set("wait-code", "1")
    code, said = head.run()
    assert code == 4 and "Not all of the 2 nodes joined within 20 s" in said
    assert head.calls == ["check", "ray start", "wait", "ray ended"] and not answers(port)


def test_a_head_that_never_comes_ends_a_worker_with_four(worker):
    code, said = worker.run(HEAD_TIMEOUT_S=1)
    assert code == 4 and "The head did not answer at 127.0.0.2" in said and not worker.calls


def test_a_ray_that_ends_early_on_a_worker_is_five(worker, port):
    listener = socket.create_server((HEAD, port))
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    process = worker.start()
    worker.wait_for("ray start")
    worker.set("ray-dies")
    said = process.communicate(timeout=SECONDS_ALLOWED)[0]
    _close(listener)
    assert process.returncode == 5 and "ended with exit code 9 although the head is there" in said


def test_a_ray_that_does_not_start_is_three(head):
    head.set("ray-fails")
    code, said = head.run()
    assert code == 3 and "Ray did not start on this node; the reason is in" in said
    head.set(
        "ray-fails", "error: ASCEND_RT_VISIBLE_DEVICES=0,1 is invalid: process 7 of anna has die 1. Set it to 2,3.\n"
    )
    code, said = head.run()
    assert code == 3 and "start on this node; ASCEND_RT_VISIBLE_DEVICES=0,1 is invalid: process 7 of anna has" in said
    assert "has die 1. Set it to 2,3; the log is" in said and "the reason is in" not in said
    assert head.calls == 2 * ["check", "ray start"]


def test_a_port_of_somebody_else_is_three_and_is_left_alone(head, port):
    with socket.create_server((HEAD, port)) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        code, said = head.run()
        assert code == 3 and f"127.0.0.2:{port} is taken by {getpass.getuser()}" in said
        assert answers(port) and head.calls == ["check"]


@pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: only root can start a process of another user")
def test_the_ray_of_another_user_is_named_and_left_alone(head, port):
    program = "import socket, sys\nserver = socket.create_server((sys.argv[1], int(sys.argv[2])))\n"
    program += "print(flush=True)\nwhile True: server.accept()"
    line = ["/usr/bin/python3", "-c", program, HEAD, str(port)]
    with subprocess.Popen(line, user=65534, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        code, said = head.run()
        alive = other.poll() is None
        other.kill()
    assert code == 3 and "is taken by nobody" in said and alive


def test_a_start_after_a_crash_ends_what_the_first_one_left(head, port):
    head.set("train-hangs")
    first = head.start()
    head.wait_for("train")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert answers(port)
    (head.tools / "train-hangs").unlink()
    code, said = head.run()
    assert code == 0 and said.count("left by an earlier start") == 2
    assert head.calls[4:] == ["training", "ray ended", "check", "ray start", "wait", "train", "ray ended"]


def test_a_note_about_a_process_that_has_gone_harms_nobody(head, port):
    folder = Path(f"/tmp/ray-{getpass.getuser()}-{port}")
    folder.mkdir()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        (folder / f"{HEAD}.processes").write_text(f"{other.pid} 1\n")
        code, said = head.run()
        alive = other.poll() is None
        other.kill()
    assert code == 0 and alive and "left by an earlier start" not in said


def test_stop_ends_what_was_left_behind_and_nothing_else(head, port):
    head.set("train-hangs")
    first = head.start()
    head.wait_for("train")
    first.send_signal(signal.SIGKILL)
    first.wait()
    code, said = head.run("--stop")
    assert code == 0 and "left by an earlier start" in said and not answers(port)
    assert head.calls[4:] == ["training", "ray ended"]
    assert head.run("--stop") == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGQUIT, 131)])
def test_a_signal_ends_training_and_ray(head, port, number, code):
    head.set("train-hangs")
    process = head.start()
    head.wait_for("train")
    if number != signal.SIGTERM:  # a terminal sends it to the whole process group
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said = process.communicate(timeout=SECONDS_ALLOWED)[0]
    assert process.returncode == code, said
    assert "interrupted; stopping what this node runs" in said
    assert head.calls[-3:] == ["train", "training", "ray ended"] and not answers(port)


@pytest.mark.parametrize(
    ("ended", "says"), [(1, "exit code 1"), (4, "exit code 4"), (137, "exit code 137 (signal KILL)")]
)
def test_a_failed_training_is_one_whatever_its_own_code_and_stops_ray(head, port, ended, says):
    head.set("train-code", str(ended))
    code, said = head.run()
    assert code == 1 and f"The training failed with {says}. The log is" in said
    assert head.calls[-1] == "ray ended" and not answers(port)


def test_a_ray_of_the_head_that_ends_during_the_training_is_five(head):
    head.set("train-ends-ray")
    head.set("train-code", "1")
    code, said = head.run()
    assert code == 5 and "Ray on this node does not answer any more (exit code 1)" in said


@pytest.mark.parametrize(
    ("waited", "code", "says"), [("2", 5, "does not answer any more"), ("3", 2, "Node configurations differ")]
)
def test_other_ends_of_a_wait_are_distinguished(head, waited, code, says):
    head.set("wait-code", waited)
    ended, said = head.run()
    assert ended == code and says in said
    assert head.calls == ["check", "ray start", "wait", "ray ended"]


@pytest.mark.parametrize(("hangs", "code"), [(True, 143), (False, 0)])
def test_a_signal_does_not_cut_the_stop_short(head, port, hangs, code):
    """This holds for a second signal, and for one that comes after the training has ended."""
    if hangs:
        head.set("train-hangs")
    head.set("ray-lingers")
    process = head.start()
    head.wait_for("train")
    if hangs:
        process.send_signal(signal.SIGTERM)
    head.wait_for("lingers")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        process.send_signal(number)
    (head.tools / "ray-lingers").unlink()
    said = process.communicate(timeout=SECONDS_ALLOWED)[0]
    assert process.returncode == code, said
    assert head.calls[-1] == "ray ended" and not answers(port)


def test_a_second_start_beside_a_job_that_runs_rejected(head, port):
    head.set("train-hangs")
    first = head.start()
    head.wait_for("train")
    before = head.calls
    code, said = head.run()
    assert code == 3 and f"This node already runs a job (process {first.pid}) of yours with this RAY_PORT" in said
    assert first.poll() is None and answers(port) and head.calls == before
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=SECONDS_ALLOWED)
    (head.tools / "train-hangs").unlink()
    assert head.run()[0] == 0


def test_two_jobs_of_one_user_run_beside_each_other(head, tmp_path, port):
    """The other job has another RAY_PORT; neither its end nor its --stop affects the first."""
    other_port = reserve_ports(HEAD)
    (tmp_path / "other").mkdir()
    other = Machine(tmp_path / "other", other_port, HEAD)
    head.set("train-hangs")
    first = head.start()
    head.wait_for("train")
    try:
        assert other.run()[0] == 0 and other.run("--stop")[0] == 0
        assert first.poll() is None and answers(port) and "training" not in head.calls
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=SECONDS_ALLOWED)
        shutil.rmtree(f"/tmp/ray-{getpass.getuser()}-{other_port}")
    assert head.calls[-2:] == ["training", "ray ended"]


def test_stop_ends_the_job_that_runs(head, port):
    head.set("train-hangs")
    first = head.start()
    head.wait_for("train")
    code, said = head.run("--stop")
    assert code == 0 and f"ending the job of process {first.pid}" in said
    assert first.wait(SECONDS_ALLOWED) == 143 and head.calls[-2:] == ["training", "ray ended"] and not answers(port)
    assert head.run("--stop") == (0, "")


@pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: only root can make a folder of another user")
def test_a_folder_of_another_user_in_tmp_rejected(head, port):
    folder = Path(f"/tmp/ray-{getpass.getuser()}-{port}")
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    code, said = head.run()
    assert code == 2 and "belongs to another user" in said and not head.calls


def test_the_scripts_of_the_vendor_may_do_what_an_interactive_shell_allows(head):
    script = head.folder / "set env.sh"
    script.write_text('false\nexport FROM_VENDOR="$NOT_SET_ANYWHERE/lib" VLLM_VERSION=other\n')
    assert head.run(CANN_ENV=script)[0] == 0
    environment = (head.tools / "environment").read_text().splitlines()
    # The cluster file takes precedence.
    assert "FROM_VENDOR=/lib" in environment and "VLLM_VERSION=0.9.1" in environment
    script.write_text("return 7\n")
    code, said = head.run(CANN_ENV=script)
    assert code == 2 and f"CANN_ENV={script} is invalid: it ended with code 7" in said


def test_two_starts_in_one_second_of_the_clock_have_folders_of_their_own(head):
    (head.tools / "date").write_text("#!/bin/bash\necho 20250101-000000\n")
    (head.tools / "date").chmod(0o755)
    assert [head.run()[0], head.run()[0]] == [0, 0]
    logs = [log.read_text() for log in (head.folder / "out put").glob("20250101-000000*/train.log")]
    assert [log.count("step 1") for log in logs] == [1, 1]


def test_a_folder_for_results_that_cannot_be_made_rejected(head):
    code, said = head.run(OUTPUT_DIR="/dev/null/results")
    assert code == 2 and head.calls == ["check"]
    assert re.search("OUTPUT_DIR=/dev/null/results.* is invalid: it cannot be created. Correct the path", said), said


@pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: only root can mount a small file system")
def test_a_full_disk_loses_the_log_and_not_the_training(head, port):
    """The file system has 64 KiB, and the training prints 200 KB."""
    head.set("train-says", "a line of the training\n" * 10000)
    settings = write_cluster_file(head.folder / "cluster.env", **head.settings)
    mount = 'mkdir "$0" && mount -t tmpfs -o size=64k tmpfs "$0" && exec bash "$@"'
    line = ["unshare", "--mount", "bash", "-c", mount, head.folder / "out put", LAUNCHER, "--cluster", settings]
    done = subprocess.run(line, env=head.environment, capture_output=True, text=True, timeout=SECONDS_ALLOWED)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout + done.stderr
    assert done.stdout.count("a line of the training") == 10000 and not answers(port)


def test_the_address_of_another_ray_in_the_users_environment_reaches_nothing(head):
    head.extra = {"RAY_ADDRESS": "127.0.0.9:1"}
    assert head.run()[0] == 0
    names = [line.partition("=")[0] for line in (head.tools / "environment").read_text().splitlines()]
    assert "RAY_PORT" not in names and "RAY_ADDRESS" not in names and "HCCL_BUFFSIZE" in names


def test_variables_of_another_job_reach_nothing(head):
    head.extra = {"RANK": "7", "LOCAL_RANK": "5", "WORLD_SIZE": "9", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1"}
    code, said = head.run("--dry-run")
    assert code == 0 and "another job: RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in said
    assert head.run()[0] == 0
    names = {line.partition("=")[0] for line in (head.tools / "environment").read_text().splitlines()}
    assert not names & set(head.extra)


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
@pytest.mark.parametrize("in_file", [False, True])
def test_inherited_list_of_npus_that_is_too_short_is_named(head, arguments, in_file):
    visible = {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    head.extra = {} if in_file else visible
    code, said = head.run(*arguments, **visible if in_file else {})
    reason = "it shows 2 NPUs, but the job takes 4. Unset it, or set it to 0,1,2,3."
    assert (code, said) == (2, f"error: ASCEND_RT_VISIBLE_DEVICES=0,1 is invalid: {reason}\n") and not head.calls
    head.extra = {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"}
    assert head.run("--dry-run")[0] == 0


@pytest.mark.parametrize(("cores", "slots"), [(2, 6), (6, 6), (320, 320)])
def test_ray_gets_a_slot_for_every_core_and_at_least_those_that_verl_places(head, cores, slots):
    """verl places a worker for each of 4 dies, the task runner, and the register center."""
    (head.tools / "nproc").write_text(f"#!/bin/bash\necho {cores}\n")
    (head.tools / "nproc").chmod(0o755)
    assert f"--num-cpus={slots}" in shlex.split(command_of_ray(head))


def command_of_ray(machine: Machine) -> str:
    code, said = machine.run("--dry-run")
    assert code == 0, said
    (line,) = (line for line in said.splitlines() if line.startswith("run ") and "start_ray.py" in line)
    return line


def test_jemalloc_is_preloaded_into_everything_where_it_is_named(head):
    library = "/lib/x86_64-linux-gnu/libc.so.6"
    assert head.run(JEMALLOC=library)[0] == 0
    assert f"LD_PRELOAD={library}" in (head.tools / "environment").read_text().splitlines()
    assert head.run()[0] == 0
    assert "LD_PRELOAD" not in (head.tools / "environment").read_text()


SECRETS = {
    "WANDB_API_KEY": "s3cret-one",
    "HF_TOKEN": "s3cret-two",
    "MY_SECRET": "s3cret-three",
    "DB_PASSWORD": "s3cret-four",
    "swanlab_api_key": "s3cret-five",
    "MYPAT": "ghp_" + "s3cret" * 6,
    "FEISHU_HOOK": "https://open.feishu.cn/open-apis/bot/v2/hook/s3cret-eight",
    "MY_KEY": "s3cret-nine",
    "HTTPS_PROXY": "http://me:s3cret-six@proxy:3128",
}


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ((), []),
        (("--resume", "auto"), ["trainer.resume_mode=auto"]),
        (("--resume", "never"), ["trainer.resume_mode=disable"]),
        (
            ("--resume", "global step_5"),
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path='{folder}/global step_5'"],
        ),
    ],
)
def test_job_continues_from_the_given_step(head, tmp_path, given, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "global step_5").mkdir()
    (tmp_path / "global step_5" / "trainer.json").write_text("{}")
    # Overrides behind -- come last and therefore take precedence.
    code, said = head.run("--dry-run", *given, "--", "trainer.save_freq=50")
    training = shlex.split([line for line in said.splitlines() if "main_ppo" in line][-1])
    expected = [each.format(folder=tmp_path) for each in settings]
    assert code == 0 and training[-len(expected) - 1 :] == [*expected, "trainer.save_freq=50"]


def test_fewer_nodes_are_waited_for_and_trained_on(head):
    """The file's NODES is the upper bound; the training gets the same number."""
    code, said = head.run("--dry-run", "--nodes", "2", NODES=3)
    lines = [shlex.split(line) for line in said.splitlines() if line.startswith("run ")]
    (waiting,) = [line for line in lines if any("wait_for_nodes" in word for word in line)]
    assert code == 0 and waiting[waiting.index("--nodes") + 1] == "2" and "trainer.nnodes=2" in lines[-1]
    assert "head of 2 nodes" in said
    for wrong in ("4", "0", "two"):
        code, said = head.run("--dry-run", "--nodes", wrong, NODES=3)
        assert (
            code == 2
            and "sets NODES=" in said
            and f"--nodes={wrong} is invalid" in said
            and "a whole number from 1 to 3" in said
        )


@pytest.mark.parametrize("given", ["latest", "/no/global_step_5", ""])
def test_a_folder_that_is_no_step_rejected(head, given):
    code, said = head.run("--dry-run", "--resume", given)
    assert code == 2 and "Set it to such a folder, auto or never" in said


def test_secrets_reach_the_training_and_are_not_shown(head):
    overrides = ("+trainer.swanlab.api_key=s3cret-seven", "data.prompt_key=question")
    code, said = head.run("--dry-run", "--", *overrides, **SECRETS)
    assert code == 0 and "s3cret" not in said, said
    for line in ("export WANDB_API_KEY=***", "export HTTPS_PROXY=http://***@proxy:3128"):
        assert line in said.splitlines()
    # Column names are not secrets.
    assert "data.prompt_key=question" in said and "api_key=***" in said
    code, said = head.run("--", *overrides, **SECRETS)
    assert code == 0 and "s3cret" not in said
    environment = (head.tools / "environment").read_text().splitlines()
    assert not {f"{name}={value}" for name, value in SECRETS.items()} - set(environment)
    assert "api_key=s3cret-seven" in next(line for line in head.lines if line.startswith("train"))
    for log in (head.folder / "out put").rglob("*.log"):
        assert "s3cret" not in log.read_text()


def test_nobody_else_can_enter_the_folder_of_ray_and_temporary_files_go_with_the_job(head, port):
    folder = Path(f"/tmp/ray-{getpass.getuser()}-{port}")
    head.set("train-hangs")
    process = head.start()
    head.wait_for("train")
    # Ray opens its own folder to everybody, so that folder is inside a closed one.
    assert folder.stat().st_mode & 0o777 == 0o700 and f"--temp-dir={folder}/r" in head.lines[1]
    left = [folder / "t" / "socket", Path(f"/dev/shm/psm_tmp-{folder.name}-t_1234")]
    other = Path(f"/dev/shm/psm_tmp-{folder.name}-other")
    for path in (*left, other):
        path.touch()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS_ALLOWED)
    assert [path.exists() for path in (*left, other)] == [False, False, True]
    assert f"TMPDIR={folder}/t" in (head.tools / "environment").read_text().splitlines()
    other.unlink()


def test_next_start_removes_shared_memory_of_a_killed_job(head, port):
    head.set("train-hangs")
    first = head.start()
    head.wait_for("train")
    left = Path(f"/dev/shm/psm_tmp-ray-{getpass.getuser()}-{port}-t_1234")
    left.touch()
    first.send_signal(signal.SIGKILL)
    first.wait()
    (head.tools / "train-hangs").unlink()
    assert head.run()[0] == 0 and not left.exists()


def test_a_process_that_has_ended_does_not_run_before_it_is_reaped_either():
    script = f"source {shlex.quote(str(ROOT))}/scripts/lib/processes.sh; "
    # The child ends when its parent has become a sleep, which never waits for it.
    child = r'bash -c "until [[ \$(cat /proc/\$PPID/comm) == sleep ]]; do :; done; exit 3"'
    script += f"exec 3< <(exec 3>&-; {child} & echo $!; exec sleep 60); read -r child <&3; "
    script += 'until [[ $(cat "/proc/$child/stat") == *") Z "* ]]; do :; done; '
    script += 'kill -0 "$child" && echo "a signal reaches it"; process_runs "$child" || echo "it has ended"; '
    script += 'process_runs $$ && echo "this one runs"; kill "$(ps -o ppid= -p "$child")"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=SECONDS_ALLOWED)
    assert done.stdout.splitlines() == ["a signal reaches it", "it has ended", "this one runs"], done.stderr


def test_a_rejected_configuration_starts_nothing(head):
    head.set("reject")
    code, said = head.run()
    assert (code, said) == (2, "error: 6 dies do not divide\n") and head.calls == ["check"]


def words(line: str) -> list[str]:
    """Return the words that bash reads from a line; no Python library parses bash's quoting."""
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], env={}, capture_output=True, check=True).stdout
    return os.fsdecode(printed).split("\0")[:-1]


def test_dry_run_only_prints_the_commands_of_a_run(head):
    script = head.folder / "set env.sh"
    script.touch()
    given = {"CANN_ENV": script, "JEMALLOC": "/lib/x86_64-linux-gnu/libc.so.6"}
    code, said = head.run("--dry-run", "--", "a='b c'", **given)
    assert code == 0 and not head.calls and not (head.folder / "out put").exists()
    assert "node 127.0.0.2 on net0: head of 2 nodes with 4 dies each" in said
    assert "setting MODEL_PATH=/weights" in said and f"source {shlex.quote(str(script))}".replace(
        "'", ""
    ) in said.replace("\\", "")
    shown = [words(line[4:]) for line in said.splitlines() if line.startswith("run ")]
    exports = [words(line[7:])[0] for line in said.splitlines() if line.startswith("export ")]
    assert head.run("--", "a='b c'", **given)[0] == 0
    ran = [["python3", *shlex.split(line)] for line in (head.tools / "arguments").read_text().splitlines()]
    start = re.compile(r"\d{8}-\d{6}")
    assert [[start.sub("START", word) for word in line] for line in shown] == [
        [start.sub("START", word) for word in line] for line in ran
    ]
    environment = (head.tools / "environment").read_text().splitlines()
    assert not set(exports) - set(environment)
    # Nothing else is set: apart from this test's own variables and those of shell and stubs, all were shown.
    names = {entry.partition("=")[0] for entry in exports}
    assert {"MASTER_ADDR", "NODES"}.isdisjoint(names) and {"HCCL_CONNECT_TIMEOUT", "LD_PRELOAD"} <= names
    own = {"_", "PWD", "OLDPWD", "SHLVL", "TOOLS", "CALLS", "NODE_ADDRESS", "PYTHON_OF_TESTS"}
    assert {entry.partition("=")[0] for entry in environment} <= names | own | set(os.environ)
    assert [words(line[3:]) for line in said.splitlines() if line.startswith("cd ")] == [[str(ROOT)]]


def test_the_interface_can_be_found_by_the_way_to_the_head(worker):
    code, said = worker.run("--dry-run", SOCKET_IFNAME="auto")
    assert code == 0 and "node 127.0.0.3 on net0: worker" in said


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"SOCKET_IFNAME": "eth9"}, "SOCKET_IFNAME=eth9 is invalid: .* This node has lo 127.0.0.1, net0 127.0.0.2"),
        (
            {"MASTER_ADDR": "127.0.0.1"},
            "MASTER_ADDR=127.0.0.1 is an address of this node, but not of SOCKET_IFNAME=net0",
        ),
        ({"MASTER_ADDR": "<address>"}, "MASTER_ADDR is still the placeholder <address>. Fill it in"),
        ({"MASTER_ADDR": "head-node"}, "MASTER_ADDR=head-node is invalid: .*the head's IPv4 address"),
        ({"MODEL_PATH": '"/weights"'}, "MODEL_PATH begins with a quote"),
        ({"MODEL_PATH": "'/weights'"}, "MODEL_PATH begins with a quote"),
        ({"NODES": "two"}, "cluster.env: NODES=two is invalid. Set it to a whole number"),
        ({"NODES": 0}, "NODES=0 is invalid. Set it to a whole number"),
        ({"POLL_S": "often"}, "POLL_S=often is invalid. Set it to seconds"),
        ({"RAY_PORT": 70000}, "RAY_PORT=70000 is invalid. Set it to a whole number from 1 to 65535"),
        ({"RAY_PORT": "08080"}, "RAY_PORT=08080 is invalid. Set it to a whole number .*, without leading zeros"),
        ({"RAY_PORT": "0100000"}, "RAY_PORT=0100000 is invalid.* without leading zeros"),
        ({"RAY_PORT": "99999999999999999999"}, "RAY_PORT=99999999999999999999 is invalid"),
        ({"DIES_PER_NODE": "016"}, "DIES_PER_NODE=016 is invalid.* without leading zeros"),
        ({"MASTER_ADDR": "10.0.0.999"}, "MASTER_ADDR=10.0.0.999 is invalid"),
        ({"MASTER_ADDR": "010.0.0.1"}, "MASTER_ADDR=010.0.0.1 is invalid"),
        ({"POLL_S": "0.0"}, "POLL_S=0.0 is invalid. Set it to seconds"),
        (
            {"HCCL_EXEC_TIMEOUT": 7200},
            "HCCL_EXEC_TIMEOUT=7200 is invalid: .* after 1800 s. Set it to a whole number from 1 to 1799",
        ),
        ({"HCCL_EXEC_TIMEOUT": 0}, "HCCL_EXEC_TIMEOUT=0 is invalid: .* from 1 to 1799"),
        ({"HCCL_EXEC_TIMEOUT": ""}, "does not set HCCL_EXEC_TIMEOUT, and HCCL's default of 1836 s exceeds"),
        ({"ALLOW_PUBLIC_ADDRESS": "maybe"}, "ALLOW_PUBLIC_ADDRESS=maybe is invalid. Set it to yes or no"),
        ({"MODEL_PATH": ""}, "does not set MODEL_PATH"),
        (
            {"CANN_ENV": "/no/such/set_env.sh"},
            "CANN_ENV=/no/such/set_env.sh is invalid: it cannot be read. Install CANN",
        ),
        ({"JEMALLOC": "/no/such.so"}, "JEMALLOC=/no/such.so is invalid: it cannot be read. Install jemalloc"),
        ({"RAY_TLS_DIR": "/no/such"}, "RAY_TLS_DIR=/no/such is invalid: ca.crt cannot be read"),
    ],
)
def test_settings_that_cannot_work_rejected(head, changed, says):
    code, said = head.run(**changed)
    assert code == 2 and re.search(says, said), said
    assert said.count("\n") == 1 and not head.calls


def test_a_setting_that_is_given_twice_rejected(head):
    settings = write_cluster_file(head.folder / "twice.env", **head.settings)
    settings.write_text(settings.read_text() + "HCCL_BUFFSIZE=200\n")
    code, said = head.run("--cluster", str(settings))
    assert code == 2 and "sets HCCL_BUFFSIZE twice" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fast"], 'Unknown argument "--fast"'),
        (["--cluster"], "needs a value"),
        (
            ["--cluster", "/tmp"],
            "--cluster=/tmp is invalid: not a readable file. Set it to a file of NAME=value lines, such as",
        ),
        (["--cluster", "/no/such"], "--cluster=/no/such is invalid: the file does not exist"),
    ],
)
def test_arguments_that_are_not_understood_rejected(head, arguments, says):
    code, said = head.run(*arguments)
    assert code == 2 and says in said


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "100.128.0.1"])
def test_a_public_address_rejected_unless_it_is_allowed(tmp_path, port, address):
    machine = Machine(tmp_path, port, address)
    code, said = machine.run("--dry-run", MASTER_ADDR=address)
    assert code == 2 and f"{address} is a public address" in said
    assert machine.run("--dry-run", MASTER_ADDR=address, ALLOW_PUBLIC_ADDRESS="yes")[0] == 0


def test_the_shipped_settings_ask_to_be_filled_in():
    done = subprocess.run(["bash", LAUNCHER, "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 2 and "MASTER_ADDR is still the placeholder" in done.stderr


def test_a_ray_that_runs_is_joined_and_neither_started_nor_stopped(worker, port):
    """This works from any node, which need not be the head in the file."""
    with socket.create_server((HEAD, port)) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        code, said = worker.run("--join", f"{HEAD}:{port}", MASTER_ADDR="10.9.9.9", RAY_PORT=1)
        assert answers(port)
    assert code == 0, said
    assert worker.calls == ["check", "wait", "train"] and "done; results are in" in said
    train = worker.lines[-1]
    assert f"[ray_init.address={HEAD}:{port}]" in train
    assert f"--address {HEAD}:{port}" in (worker.tools / "arguments").read_text()


def test_a_joined_ray_whose_nodes_differ_or_that_ends_is_told(worker, port):
    worker.set("wait-code", "3")
    code, said = worker.run("--join", f"{HEAD}:{port}")
    assert code == 2 and "Node configurations differ" in said and worker.calls == ["check", "wait"]
    worker.set("wait-code", "1")
    code, said = worker.run("--join", f"{HEAD}:{port}")
    assert code == 4 and f"The Ray at {HEAD}:{port} does not have 2 nodes with" in said
    assert "start this script" not in said and worker.calls[-1] == "wait"
    worker.set("wait-code", "0")
    worker.set("train-code", "1")
    code, said = worker.run("--join", f"{HEAD}:{port}")
    assert code == 5 and f"Ray at {HEAD}:{port} does not answer any more (exit code 1)" in said


def test_a_dry_run_of_a_join_names_no_ray_to_start(worker, port):
    code, said = worker.run("--join", f"{HEAD}:{port}", "--dry-run")
    assert code == 0 and "run python3 scripts/internal/wait_for_nodes.py" in said and "start_ray" not in said


def test_the_head_may_be_named_on_the_command_line(head):
    code, said = head.run("--master", "127.0.0.2", MASTER_ADDR="<address of the head node>")
    assert code == 0 and head.calls == ["check", "ray start", "wait", "train", "ray ended"], said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--join", "127.0.0.2"], "--join=127.0.0.2 is invalid. Set it to HOST:PORT"),
        (["--join", "127.0.0.2:x"], "RAY_PORT"),
        (["--join", "127.0.0.2:1", "--master", "127.0.0.2"], "Remove one of them"),
        (
            ["--master", "no-such-host.invalid"],
            "--master=no-such-host.invalid is invalid: the name has no IPv4 address",
        ),
        (["--master"], "--master needs a value"),
    ],
)
def test_a_head_that_cannot_be_rejected(head, arguments, sentence):
    code, said = head.run(*arguments, HEAD_TIMEOUT_S=1)
    assert code == 2 and sentence in said and not head.calls
