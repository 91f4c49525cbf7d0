"""The supervisor over a scripted training: the cause of every failure, and the action that follows."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest

from post_training.processes.command import SignalFlag
from post_training.processes.descendants import wait_until
from post_training.recovery.policy import NEVER_RETRIED
from post_training.report.heartbeat import HEARTBEAT, read_progress
from scripts.supervision.start import Silence, Start
from tests.scripts.namespaces import on_small_disk, reason_why_not
from verl_patches.features.measure.run_files import RunFiles

ROOT = Path(__file__).resolve().parents[2]
STEPS = 7
FOLLOWING = ROOT / "tests" / "scripts" / "following_training.py"
TRAINING = ROOT / "tests" / "scripts" / "failing_training.py"
# Failures after step 3, when the newest checkpoint is that of step 2, and the cause that must be recognized.
CAUSES = {
    "OOM": "OOM",
    "worker_died": "worker_died",
    "killed": "worker_died",
    "ray_died": "ray_died",
    "network_error": "network_error",
    "port_taken": "network_error",
    "hang": "hang",
    "silent": "hang",
    "full_disk": "full_disk",
    "reward_error": "reward_error",
    "not_valid": "not_valid",
    "nonfinite_weights": "not_valid",
    "bad_configuration": "bad_configuration",
    "in_use": "in_use",
    "device_error": "device_error",
    "host_memory": "host_memory",
    "operator_error": "operator_error",
    "unknown": "unknown",
}


class Bench:
    """Runs the supervisor in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "run of it"

    def command(self, plan: list[dict], *options: str, overrides: tuple[str, ...] = ()) -> list[str]:
        script, policy = self.folder / "plan.json", self.folder / "policy.yaml"
        script.write_text(json.dumps(plan))
        if not policy.exists():
            self.policy()
        supervise = [sys.executable, "scripts/supervise.py", "--policy", str(policy), "--output", str(self.output)]
        training = [sys.executable, str(TRAINING), str(script), str(STEPS)]
        return [*supervise, *options, "--", *training, *overrides]

    def policy(self, text: str = "interval_seconds: 0") -> None:
        (self.folder / "policy.yaml").write_text(f"retry_options:\n  {text}\n")

    def run(self, plan: list[dict], *options: str, **more) -> subprocess.CompletedProcess:
        command = self.command(plan, *options, **more)
        return subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
        )

    @property
    def starts(self) -> list[list[str]]:
        file = self.output / "starts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def record(self) -> list[dict]:
        return [json.loads(line) for line in (self.output / "supervision.jsonl").read_text().splitlines()]

    @property
    def metrics(self) -> list[tuple[int, dict]]:
        records = [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]
        return [(record["step"], record["metrics"]) for record in records]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def after(step: int | None, how: str) -> dict:
    return {"after": step, "how": how}


@pytest.mark.parametrize("how", CAUSES)
def test_a_failure_is_named_and_met_as_it_has_to_be(bench, how):
    """The run is either completed with the metrics of an unbroken one, or not started again."""
    ended = bench.run([after(3, how)], *(["--silent-after", "2"] if how == "silent" else []))
    (failed,) = [entry for entry in bench.record if "cause" in entry]
    assert (failed["cause"], failed["step"]) == (CAUSES[how], 3), ended.stdout + ended.stderr
    if CAUSES[how] in NEVER_RETRIED:
        assert ended.returncode == (2 if how in ("bad_configuration", "in_use") else 1) and len(bench.starts) == 1
        assert f"it is not started again: {CAUSES[how]} is not retried" in ended.stdout
    else:
        assert ended.returncode == 0 and len(bench.starts) == 2, ended.stdout + ended.stderr
        assert bench.metrics == [(step, {"critic/score/mean": step / 7}) for step in range(1, STEPS + 1)]
        assert "again in 0 s from the checkpoint of step 2" in ended.stdout


class Training:
    """A training as a supervisor sees it, under a fake clock."""

    def __init__(self, folder: Path, left_before: int | None = None) -> None:
        self.now, self.folder = 0.0, folder
        if left_before is not None:
            self.progress(left_before)
        self.silence = Silence(partial(read_progress, folder), lambda: self.now)

    def progress(self, count: int) -> None:
        RunFiles(str(self.folder)).heartbeat(count, 3, "17", "rollout")

    def seconds_after(self, seconds: float) -> float:
        self.now += seconds
        return self.silence.seconds()


def test_progress_without_output_is_life(tmp_path):
    """Rollouts of 10,600 s print nothing while decode steps end; the limit is 7,200 s."""
    training = Training(tmp_path)
    for minute in range(1, 178):
        assert training.seconds_after(60.0) <= 60.0
        training.progress(minute)
    assert training.seconds_after(60.0) == 0.0
    assert training.seconds_after(7300.0) == 7300.0, "no progress is silence"


def test_output_without_progress_is_life(tmp_path):
    training = Training(tmp_path)
    training.seconds_after(7000.0)
    training.silence.output()
    assert training.seconds_after(7000.0) == 7000.0


@pytest.mark.parametrize("content", [None, "", "{", '{"time": 1}'])
def test_an_unreadable_heartbeat_is_no_life(tmp_path, content):
    training = Training(tmp_path)
    if content is not None:
        (tmp_path / HEARTBEAT).write_text(content)
    assert training.seconds_after(7300.0) == 7300.0


def test_the_heartbeat_of_an_earlier_start_is_no_life(tmp_path):
    training = Training(tmp_path, left_before=500)
    assert training.seconds_after(7300.0) == 7300.0
    training.progress(1)
    assert training.seconds_after(1.0) == 0.0


def test_indiscriminate_retry_detected(bench, monkeypatch):
    """The control of the table above: if every cause is retried, recurring failures are started again."""
    command = bench.command([after(3, "reward_error")] * 3)
    patched = (
        "import sys; sys.path.insert(0, 'scripts'); import post_training.recovery.policy as p; "
        "p._USUAL.update(dict.fromkeys(p._USUAL, 'retry')); import supervise; sys.exit(supervise.main(sys.argv[1:]))"
    )
    subprocess.run([command[0], "-c", patched, *command[2:]], cwd=ROOT, env=environment(), timeout=600, check=False)
    assert len(bench.starts) > 1


def test_memory_is_met_by_smaller_micro_batches_in_every_later_start(bench):
    ended = bench.run([after(1, "OOM"), after(3, "worker_died")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    smaller = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    assert [smaller in start for start in bench.starts] == [False, True, True]
    assert f"again in 0 s from the beginning with {smaller}" in ended.stdout


def test_the_same_failure_after_the_same_step_ends_it_with_a_bundle(bench):
    ended = bench.run([after(3, "worker_died")] * 5)
    assert ended.returncode == 1 and len(bench.starts) == 2
    assert "worker_died twice after step 3" in ended.stdout
    (bundle,) = bench.output.glob("failure-*.tar.gz")
    with tarfile.open(bundle) as archive:
        names = {Path(name).name for name in archive.getnames()}
        log = archive.extractfile(next(each for each in archive if each.name.endswith("start_2.log"))).read().decode()
    assert {"start_2.log", "config.yaml", "metrics.jsonl", "events.jsonl", "versions.txt", "supervision.jsonl"} <= names
    assert "ActorDiedError" in log and not list(bench.output.glob("*.partial"))


def test_earlier_start_does_not_explain_a_later_one(bench):
    """The first start reports out of memory; the second is killed and reports nothing."""
    ended = bench.run([after(3, "OOM"), after(5, "killed")])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [(entry["cause"], entry["step"]) for entry in bench.record if "cause" in entry] == [
        ("OOM", 3),
        ("worker_died", 5),
    ]


def test_earlier_fault_does_not_explain_a_later_failure(bench):
    """The first start's hang stays in faults.jsonl, for a step that is not trained again."""
    ended = bench.run([after(3, "hang"), after(5, "unknown")])
    causes = [entry["cause"] for entry in bench.record if "cause" in entry]
    assert causes == ["hang", "unknown"] and ended.returncode == 1


def test_configuration_of_an_earlier_start_not_reduced(bench):
    """The second start ends before it has resolved its configuration, so its micro batches are unknown."""
    ended = bench.run([after(3, "OOM"), after(None, "OOM")])
    assert ended.returncode == 1 and len(bench.starts) == 2, ended.stdout + ended.stderr
    assert "the run ended before it wrote its configuration" in ended.stdout
    (bundle,) = bench.output.glob("failure-*.tar.gz")
    with tarfile.open(bundle) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"start_2.log", "earlier/config.yaml", "earlier/metrics.jsonl", "supervision.jsonl"} <= names


def test_step_of_an_earlier_start_is_not_this_ones(bench):
    """A failure after step 3 and one before any step are different; two before any step are the same failure twice."""
    ended = bench.run([after(3, "worker_died"), after(None, "worker_died"), after(None, "worker_died")])
    assert [entry["step"] for entry in bench.record if "cause" in entry] == [3, 2, 2]
    assert ended.returncode == 1 and "worker_died twice after step 2" in ended.stdout


def test_damaged_records_set_aside_between_starts(bench):
    """A power loss leaves a whole line of zeros between good lines."""
    bench.run([after(3, "unknown")])
    file = bench.output / "events.jsonl"
    file.write_bytes(b"\0" * 40 + b"\n" + file.read_bytes())
    ended = bench.run([after(3, "unknown"), after(5, "OOM")])
    assert ended.returncode == 0 and "events.jsonl: 1 damaged line was set aside" in ended.stderr
    assert (bench.output / "events.jsonl.damaged").read_bytes() == b"\0" * 40 + b"\n"
    assert [entry["cause"] for entry in bench.record if "cause" in entry] == ["unknown", "OOM"]


def test_two_supervisors_of_one_folder_rejected(bench):
    """The second is rejected before it starts anything; the first continues, and its record is unchanged."""
    first = subprocess.Popen(
        bench.command([after(3, "silent")]), cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert any("step:3" in line for line in first.stdout)
    second = bench.run([])
    first.send_signal(signal.SIGQUIT)
    first.communicate(timeout=600)
    assert second.returncode == 2 and f"is in use by process {first.pid}" in second.stderr
    assert "a start;" not in second.stdout and len(bench.starts) == 1 and first.returncode == 131
    assert bench.run([]).returncode == 0


def test_folder_in_use_does_not_end_the_other_nodes(bench):
    """Supervisors of the job that owns the folder read its record."""
    bench.run([after(3, "in_use")])
    assert not [entry for entry in bench.record if "ended" in entry]
    assert [entry["left"] for entry in bench.record if "left" in entry] == [2]


def test_a_run_that_makes_progress_may_fail_often(bench):
    bench.policy("{interval_seconds: 0, max_retry_times: 1}")
    ended = bench.run([after(2, "worker_died"), after(4, "worker_died"), after(6, "hang")])
    assert ended.returncode == 0 and len(bench.starts) == 4, ended.stdout


def test_the_number_of_retries_without_progress_is_bounded(bench):
    bench.policy("{interval_seconds: 0, max_retry_times: 2}")
    ended = bench.run([after(0, "network_error")] * 9)
    assert ended.returncode == 1 and len(bench.starts) == 3
    assert "max_retry_times is 2, and there is no checkpoint since" in ended.stdout


def test_training_output_is_printed_and_kept(bench):
    ended = bench.run([])
    assert ended.returncode == 0 and "step:7\n" in ended.stdout
    assert (bench.output / "start_1.log").read_text().count("step:") == STEPS


def test_a_second_supervision_goes_on_from_what_the_first_has_left(bench):
    bench.run([after(5, "unknown")])
    ended = bench.run([after(5, "unknown")])
    assert ended.returncode == 0 and [step for step, _ in bench.metrics] == list(range(1, STEPS + 1))
    assert (bench.output / "start_2.log").is_file() and len(bench.starts) == 2


@pytest.fixture
def another_node(bench, request):
    """Start the supervisor of a node that gives its dies to the head, in the head's folder."""
    script, record, starts = FOLLOWING, bench.output / "supervision.jsonl", bench.folder / "follows"
    command = bench.command([])
    command = [*command[: command.index("--") + 1], sys.executable, str(script), str(record), str(starts)]
    command.append(str(getattr(request, "param", 0)))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment() | {"SLURMD_NODENAME": "another"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert wait_until(starts.exists, 60)
    yield process, starts
    process.kill()
    process.wait()


@pytest.mark.parametrize("another_node", [0, 5], indirect=True, ids=["alone", "beside the next Ray of the head"])
def test_every_node_starts_again_with_the_head_and_ends_with_it(bench, another_node):
    """A node's launcher ends with 0 whenever the head's Ray ends, or with 5 if its next Ray is already there."""
    process, starts = another_node
    ended = bench.run([after(3, "worker_died"), after(5, "ray_died")])
    said, _ = process.communicate(timeout=600)
    assert ended.returncode == process.returncode == 0, ended.stdout + said
    assert len(bench.starts) == 3 and 1 <= len(starts.read_text().splitlines()) <= 3
    assert "the head's supervisor ended the training with 0" in said and "it failed" not in said
    assert [step for step, _ in bench.metrics] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("role, code", [("worker", 0), ("head", None)])
def test_only_a_worker_may_be_silent_for_long(tmp_path, role, code):
    """A day passes at each look at the clock once the role is reported; the command ends after ten."""
    start, over = Start.begin(tmp_path), tmp_path / "over"
    days = itertools.count()

    def clock() -> float:
        if "reported" not in start.log.read_text():
            return 0.0
        day = next(days)
        if day == 10:
            over.touch()
        return 86400.0 * day

    report = f'{shlex.quote(sys.executable)} -m post_training.start_status "role=$1"; echo reported'
    wait = ["bash", "-c", f"{report}; until [[ -e $2 ]]; do sleep 0.05; done", "-", role, str(over)]
    with SignalFlag() as signals:
        assert start.run(wait, signals, Silence(lambda: None, clock), silent_after=3600) == code


def test_a_training_that_is_given_up_is_given_up_on_every_node(bench, another_node):
    process, _ = another_node
    ended = bench.run([after(3, "unknown")])
    said, _ = process.communicate(timeout=600)
    assert ended.returncode == process.returncode == 1, ended.stdout + said
    assert "the head's supervisor ended the training with 1" in said


def test_a_node_that_leaves_does_not_end_the_training(bench, another_node):
    process, _ = another_node
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 143
    (left,) = [entry["left"] for entry in bench.record if "left" in entry]
    assert left == 143 and not [entry for entry in bench.record if "ended" in entry]
    assert bench.run([]).returncode == 0


def test_a_folder_of_the_commands_own_is_kept(bench):
    own = bench.folder / "own"
    ended = bench.run([], overrides=(f"trainer.default_local_dir={own}",))
    assert ended.returncode == 0 and (own / "global_step_6").is_dir()


@pytest.mark.parametrize("how, number", [("silent", signal.SIGTERM), (None, signal.SIGINT), ("silent", signal.SIGQUIT)])
def test_a_signal_ends_the_training_too_and_nothing_is_left(bench, how, number):
    """The signal comes in the middle of a training, or while the supervisor waits for the next start."""
    bench.policy("interval_seconds: 3600")
    plan = [after(3, how or "worker_died")]
    supervisor = subprocess.Popen(
        bench.command(plan), cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    sign = "step:3" if how else "again in 3600 s"
    for line in supervisor.stdout:
        if sign in line:
            break
    supervisor.send_signal(number)
    output, _ = supervisor.communicate(timeout=600)
    assert supervisor.returncode == 128 + number and "all processes have been stopped" in output
    assert wait_until(lambda: not processes_that_name(str(bench.folder)), 10)


def processes_that_name(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words and "pytest" not in words:
            found.append(words)
    return found


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "Command missing. Pass one after --"),
        (["--", "bash", "scripts/rehearse.sh"], "A rehearsal resumes with its own --resume"),
        (
            ["--", "bash", "scripts/train_qwen2_5_0_5b_gsm8k.sh", "--emulate"],
            "A rehearsal resumes with its own --resume",
        ),
        (["--policy", "absent.yaml", "--", "true"], "--policy absent.yaml cannot be read"),
        (["--", "no-such-command"], "Command not found: no-such-command"),
        (["--output", "/dev/null/x", "--", "true"], "--output=/dev/null/x is invalid: it cannot be created"),
    ],
)
def test_invalid_supervision_rejected_before_it_starts(arguments, sentence):
    command = [sys.executable, "scripts/supervise.py", *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 2 and sentence in ended.stderr and "Traceback" not in ended.stderr


def test_full_disk_reported_before_anything_starts(bench):
    reason = reason_why_not()
    if reason:
        pytest.skip(f"NOT RUN, a full disk: {reason}")
    bench.output.mkdir()
    command = on_small_disk(bench.output, "32k", *bench.command([]))
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr and "a start;" not in ended.stdout
    assert f"error: the disk that holds {bench.output}" in ended.stderr and "is full" in ended.stderr


def test_a_dry_run_prints_the_command_and_makes_nothing(tmp_path):
    launcher = ["bash", "scripts/train_deepseekv3_256die_true_weight.sh", "--cluster", "file"]
    command = [sys.executable, "scripts/supervise.py", "--output", str(tmp_path / "it's"), "--dry-run", "--", *launcher]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=True
    )
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {ended.stdout}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[: len(launcher) + 1] == [*launcher, "--"]
    assert words[-1] == "trainer.resume_mode=auto" and "it\\'s/checkpoints" in words[-2]
    assert not (tmp_path / "it's").exists()
