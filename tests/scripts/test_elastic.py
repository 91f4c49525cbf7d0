"""Continuing with fewer nodes: the decision under a fake clock, and the supervisor over a fake launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from post_training.plan.fewer_nodes import Layout, Layouts
from post_training.processes.descendants import wait_until
from post_training.recovery.causes import Failure
from post_training.recovery.decision import Again, Attempt, Enough, Supervision
from post_training.recovery.policy import Policy
from post_training.run_lock import owning
from rehearsal.tiny_model.architecture import TINY_MODELS
from scripts.supervision.elastic import Elastic, NodesReturned, NoLayout, Patience
from scripts.supervision.launched_job import describe_launched, plan_layouts, with_options
from tests.scripts import failing_training

ROOT = Path(__file__).resolve().parents[2]
EIGHT = Layout(8, "TP4 PP8 EP4 DP4", ("trainer.nnodes=8",))
SHORT = "update: 78.90 GB a die, but a die has 65.50"


class Job:
    """A job of 16 nodes that can continue with 8; the test sets which nodes exist and which step is saved."""

    def __init__(self, there: int = 16, wait_s: float = 600, look_s: float = 60) -> None:
        self.now, self.there, self.step = 0.0, there, 0
        self.said: list[str] = []
        self.planned_with: list[tuple[str, ...]] = []
        self.during = lambda: None
        patience = Patience(wait_s, look_s)
        self.elastic = Elastic(
            self.plan, lambda: range(self.there), lambda: self.step, patience, self.said.append, self.wait,
            lambda: self.now,
        )  # fmt: skip

    def plan(self, overrides: tuple[str, ...]) -> Layouts:
        self.planned_with.append(overrides)
        return Layouts(16, 1, (EIGHT,), {15: "it does not divide", 4: SHORT})

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.during()

    def run(self, seconds: float) -> None:
        """Let the training run for so many seconds; the decision is checked five times a second."""
        for _ in range(int(seconds * 5)):
            self.now += 0.2
            self.elastic.check_returned()


def test_all_nodes_start_as_configured_at_once():
    job = Job()
    assert job.elastic.choose([]).nodes == 16 and job.elastic.fewer is None and job.now == 0 and not job.said


def test_lost_node_waited_for_and_gone_on_without():
    job = Job(there=15)
    assert job.elastic.choose([]) == EIGHT == job.elastic.fewer and job.now == 600
    assert job.said == [
        "15 of 16 nodes are there; waiting up to 600 s",
        "15 of 16 nodes are there: it continues with 8, TP4 PP8 EP4 DP4; the batches of a step stay the same",
    ]
    job.step = 40
    assert job.elastic.facts() == {"nodes": 8, "of_nodes": 16, "layout": "TP4 PP8 EP4 DP4", "from_step": 40}


def test_what_it_can_go_on_with_is_said_at_once():
    assert Job().elastic.describe() == (f"of 16 nodes it can continue with 8 (TP4 PP8 EP4 DP4); 4 cannot: {SHORT}")


def test_node_that_returns_within_the_wait_costs_no_layout():
    job = Job(there=15)
    job.during = lambda: setattr(job, "there", 16 if job.now >= 300 else 15)
    assert job.elastic.choose([]).nodes == 16 and 300 <= job.now <= 302


def test_nodes_that_hold_no_layout_end_it_with_the_memory():
    with pytest.raises(NoLayout) as ended:
        Job(there=7).elastic.choose([])
    assert str(ended.value) == f"7 of 16 nodes are there, too few for the job; 4 cannot: {SHORT}"


def test_training_goes_back_at_the_checkpoint_after_a_return():
    """A checkpoint from before the return does not count, as the steps since it would be lost."""
    job = Job(there=15, wait_s=0)
    job.elastic.choose([])
    job.step = 20
    job.run(130)
    job.there = 16
    job.run(70)
    assert job.said[-1] == "16 of 16 nodes are there: the training goes back to 16 at its next checkpoint"
    job.run(1000)
    job.step = 40
    with pytest.raises(NodesReturned, match="the checkpoint of step 40 is complete"):
        job.run(2)
    assert job.elastic.choose([]).nodes == 16
    assert job.said[-1] == "all 16 nodes are there: it continues as configured"


def test_nodes_that_leave_again_before_the_checkpoint_change_nothing():
    job = Job(there=15, wait_s=0)
    job.elastic.choose([])
    job.there = 16
    job.run(61)
    job.there = 12
    job.run(61)
    job.step = 20
    job.run(61)
    assert job.said[-1] == "12 of 16 nodes are there: it stays on 8"


def test_more_nodes_without_a_larger_layout_change_nothing():
    job = Job(there=8, wait_s=0)
    job.elastic.choose([])
    job.there = 15
    job.run(200)
    job.step = 20
    job.run(200)
    assert "goes back" not in " ".join(job.said)


def test_smaller_micro_batches_are_planned_with():
    job = Job(there=15, wait_s=0)
    job.elastic.choose([])
    job.elastic.choose(["a.micro=4"])
    job.elastic.choose(["a.micro=4"])
    assert job.planned_with == [(), ("a.micro=4",)]


def test_second_node_lost_after_the_same_step_is_another_failure():
    def decided(nodes):
        supervision, lost = Supervision(Policy()), Failure("ray_died", "its node has died")
        for count in nodes:
            found = supervision.decide(Attempt(lost, 20, 20, nodes=count))
        return type(found)

    assert decided([16, 8]) is Again and decided([16, 16]) is Enough


# Describes itself as the launchers do; called with `--nodes` and overrides behind `--`, it trains.
LAUNCHER = r"""
nodes=2 dry=no
while (($#)); do
    case $1 in
        --nodes) nodes=$2; shift 2 ;;
        --describe) dry=yes; shift ;;
        --) shift; break ;;
        *) printf 'error: Unknown argument "%s"\n' "$1" >&2; exit 2 ;;
    esac
done
if [[ $dry == yes ]]; then
    echo "ignored in the environment, because they belong to another job: RANK"
    command=(python3 -m verl_patches.trainer.main_ppo --config-name qwen2_5_0_5b_gsm8k "trainer.nnodes=$nodes")
    command+=(trainer.n_gpus_per_node=1 ray_init.address=auto +scale=emulated_qwen2_5 trainer.save_freq=1)
    command+=("actor_rollout_ref.model.path='@FOLDER@'" "$@")
    set -- @ROLE@ NPU_EMULATOR_CAPACITY_MB=@MEMORY@ -- "${command[@]}"
    PYTHONPATH=@ROOT@ exec '@PYTHON@' -m post_training.node_part "$@"
fi
echo $$ > '@FOLDER@/pid'
exec '@PYTHON@' '@TRAINING@' '@FOLDER@/plan.json' 8 "nodes=$nodes" "$@"
"""


class Bench:
    """The supervisor over a launcher that runs only a scripted job."""

    def __init__(self, folder: Path, plan: list[dict], memory: int = 1024, role: str = "head") -> None:
        self.folder, self.output = folder, folder / "run"
        words = {
            "@ROLE@": role, "@MEMORY@": str(memory), "@FOLDER@": str(folder), "@PYTHON@": sys.executable,
            "@TRAINING@": str(Path(failing_training.__file__)), "@ROOT@": str(ROOT),
        }  # fmt: skip
        text = LAUNCHER
        for word, value in words.items():
            text = text.replace(word, value)
        self.launcher = folder / "launcher.sh"
        self.launcher.write_text(text)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **TINY_MODELS["qwen2"]}))
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "policy.yaml").write_text("retry_options:\n  interval_seconds: 0\n")

    def command(self, *options: str) -> list[str]:
        supervise = [sys.executable, "scripts/supervise.py", "--policy", str(self.folder / "policy.yaml")]
        supervise += ["--output", str(self.output), "--elastic", "--wait-for-nodes", "0", "--look-for-nodes", "0.1"]
        return [*supervise, *options, "--", "bash", str(self.launcher)]

    @contextmanager
    def running(self, *options: str):
        """Yield the supervisor's process, and a function that returns its output so far."""
        log = self.folder / "said"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with log.open("w") as output, subprocess.Popen(
            self.command(*options), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                yield SimpleNamespace(process=process, said=log.read_text)
            finally:
                process.kill()

    @property
    def record(self) -> list[dict]:
        return [json.loads(line) for line in (self.output / "supervision.jsonl").read_text().splitlines()]


def test_supervisor_goes_on_with_one_node_and_back_to_two(tmp_path):
    """The second node leaves while the first start hangs, and returns while the second start hangs."""
    bench = Bench(tmp_path, [{"after": 3, "how": "silent"}, {"after": 5, "how": "silent"}])
    with bench.running() as running, ExitStack() as second:
        second.enter_context(owning([bench.output], "supervise-second"))

        def until(words: str) -> None:
            there = wait_until(lambda: words in running.said() or running.process.poll() is not None, 300)
            assert there and running.process.poll() is None, running.said()

        until("step:3")
        second.close()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        until("1 of 2 nodes are there: it continues with 1, FSDP over 1 dies, rollout 1 x TP1")
        until("step:5")
        second.enter_context(owning([bench.output], "supervise-second"))
        until("the training goes back to 2 at its next checkpoint")
        failing_training._save(bench.output / "checkpoints", 6)
        assert running.process.wait(300) == 0, running.said()
    starts = [entry for entry in bench.record if "start" in entry]
    assert [(each["nodes"], each["of_nodes"], each["from_step"]) for each in starts] == [
        (2, 2, 0),
        (1, 2, 2),
        (2, 2, 6),
    ]
    given = [json.loads(line) for line in (bench.output / "starts.jsonl").read_text().splitlines()]
    assert [words[0] for words in given] == ["nodes=2", "nodes=1", "nodes=2"]
    assert ["trainer.nnodes=1" in words for words in given] == [False, True, False]
    assert [each["after"] for each in bench.record if "after" in each] == ["worker_died", "nodes_returned"]


def test_supervisor_names_the_memory_that_one_node_lacks(tmp_path):
    bench = Bench(tmp_path, [], memory=8)
    with bench.running() as running:
        assert running.process.wait(300) == 1
    assert "of 2 nodes it cannot continue with fewer; 1 cannot: FSDP over 1 dies" in running.said()
    assert "it is not started again: 1 of 2 nodes are there, too few for the job; 1 cannot: " in running.said()
    assert "GB a die, but a die has 0.01" in running.said() and bench.record[-1]["ended"] == 1


def test_worker_leaves_the_decision_to_the_head(tmp_path):
    bench = Bench(tmp_path, [], role="worker")
    assert describe_launched(["bash", str(bench.launcher)]) is None


@pytest.mark.parametrize(
    "command, sentence",
    [
        (["python3", "-m", "verl_patches.trainer.main_ppo"], "--elastic is invalid: the command is not a launcher"),
        (["bash", "l.sh", "--join", "a:1"], "--join is invalid with --elastic"),
        (["bash", "LAUNCHER", "--no-such"], '--elastic is invalid: the launcher says: Unknown argument "--no-such"'),
    ],
)
def test_command_that_cannot_be_elastic_rejected(tmp_path, command, sentence):
    launcher = str(Bench(tmp_path, []).launcher)
    with pytest.raises(ValueError) as rejected:
        describe_launched([launcher if word == "LAUNCHER" else word for word in command])
    assert str(rejected.value).startswith(sentence)


def test_launchers_options_stand_before_its_overrides():
    assert with_options(["bash", "l.sh", "--", "a=1"], ["--nodes", "8"]) == "bash l.sh --nodes 8 -- a=1".split()
    assert with_options(["bash", "l.sh"], ["--nodes", "8"]) == "bash l.sh --nodes 8".split()


@pytest.mark.parametrize("code", ["1", "3"])
def test_plan_that_fails_is_named_with_its_exception(code):
    """torch_npu prints a line about an unknown error after it."""
    program = "import sys; print('error: no such model\\nERR99999 UNKNOWN applicaiton exception', file=sys.stderr)"
    command = [sys.executable, "-c", f"{program}; sys.exit({code})"]
    job = SimpleNamespace(plan_command=lambda overrides, least, die_memory: command)
    with pytest.raises(ValueError, match="no such model$"):
        plan_layouts(job, [], 1, None)


def test_real_launcher_is_understood(tmp_path, monkeypatch):
    """This machine is the head of two nodes. The cluster's file is relative to the user's folder."""
    from tests.scripts.cluster_files import write_cluster_file

    file = write_cluster_file(
        tmp_path / "it's a cluster.env", MASTER_ADDR="127.0.0.1", SOCKET_IFNAME="lo", NODES=2, DIES_PER_NODE=1,
        MODEL_PATH=tmp_path / "a model", TRAIN_FILES="/d", TEST_FILES="/d", OUTPUT_DIR=tmp_path, CANN_ENV="none",
        JEMALLOC="none",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    launcher = str(ROOT / "scripts" / "train_deepseekv3_256die_true_weight.sh")
    job = describe_launched(["bash", launcher, "--cluster", file.name, "--", "data.seed=7"])
    assert job is not None and job.emulated_mb is None and "trainer.nnodes=2" in job.words
    assert job.model == tmp_path / "a model" / "config.json"
    command = job.plan_command(["trainer.nnodes=1"], 1, "61GiB")
    assert command[command.index("--config-name") + 1] == "deepseek_v3_256die_true_weight"
    assert command[command.index("--cluster") + 1] == str(file) and command[-1] == "trainer.nnodes=1"
    assert "data.seed=7" in command and "--check" not in command
