"""The entry point with Ray, four dies and verl's own loop, in separate processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from post_training.overrides import setting
from post_training.processes.descendants import descendants, wait_until
from post_training.report import RunFacts, read_records, summarise
from post_training.report.samples import read_samples
from rehearsal.plan import run_environment
from tests.scripts.namespaces import on_small_disk
from tests.shared_templates import started_with
from tests.shared_training import command_of
from tests.verl_patches.trainer.surroundings import surroundings
from verl_patches.features.measure.run_files import read_faults
from verl_patches.trainer.isolated_ray import python_of_workers

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
STEPS = 3
MARKER = "MARK_OF_A_RUN"
# How a run ends does not depend on the number of dies: TP2 in training and rollout, one pipeline stage.
TWO_DIES = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[3]",
    "actor_rollout_ref.overlay.rollout.expert_parallel_size=2",
)


def command(inputs, output, *overrides):
    """Return the run's command line and environment, and the mark that all its processes carry."""
    checkpoint, data = inputs
    arguments = [
        f"actor_rollout_ref.model.path={checkpoint}",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.overlay.measure.output_dir={output}",
        "data.train_batch_size=8",
        f"trainer.total_training_steps={STEPS}",
        *overrides,
    ]
    mark = uuid.uuid4().hex
    environment = started_with(os.environ) | run_environment(overrides)
    environment |= {"NPU_EMULATOR_DEVICES": "4", "NPU_EMULATOR_CAPACITY_MB": "1024"}
    environment |= {"NPU_EMULATOR_NODE": os.environ["NPU_EMULATOR_NODE"], MARKER: mark}
    return [sys.executable, "-m", "rehearsal.training", *arguments], environment, mark


def processes_with(mark) -> list[str]:
    """Return the command lines of live processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (OSError, PermissionError):
            continue
    return found


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(folder):
    """Return the lines of the steps that the run in `folder` has trained so far."""
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def float32_run(inputs, tmp_path_factory):
    """Run in float32. Yield its folder, its place, a stranger's attacks before each step, and what the run left."""
    folder = tmp_path_factory.mktemp("float32")
    with surroundings() as place:
        line, environment, mark = command(
            inputs,
            folder,
            "actor_rollout_ref.overlay.precision=float32",
            "actor_rollout_ref.overlay.measure.verify_weights=true",
        )
        environment |= place.variables
        with place.watched(), (folder / "said").open("w") as said:
            streams = {"stdout": said, "stderr": subprocess.STDOUT, "text": True}
            with subprocess.Popen(place.command(line), env=environment, cwd=folder, **streams) as process:
                wait_for_event(process, folder, "training_begins", folder / "said")
                place.look()
                attacks = []
                # Ray's agent may start at any time, so the stranger tries before every step.
                for step in range(STEPS):
                    attacks += [place.stranger(folder / "mark")] if place.node else []
                    wait_until(lambda step=step: process.poll() is not None or len(trained(folder)) > step, 500)
                process.wait(500)
            left = processes_with(mark) + place.left()
        assert process.returncode == 0, (folder / "said").read_text()[-4000:]
        yield folder, place, attacks, left


def wait_for_event(process, folder, event, said):
    """Wait until the run in `folder`, which writes into `said`, has recorded `event`."""
    deadline, events = time.monotonic() + 300, folder / "events.jsonl"
    while not events.exists() or f'"{event}"' not in events.read_text():
        assert time.monotonic() < deadline and process.poll() is None, said.read_text()[-4000:]
        time.sleep(0.1)


def test_a_run_leaves_no_process_no_temporary_file_and_no_shared_memory(float32_run):
    _, place, _, left = float32_run
    assert left == []
    # These existed during the run: vLLM's ring buffer, the emulated dies' shared memory, and Ray's folder.
    assert any(name.startswith(f"psm_tmp-{place.temporary.name}-run-") for name in place.shared_memory)
    assert any(name.endswith(place.emulated_node) for name in place.shared_memory) and place.ray_folders


def test_a_run_listens_on_loopback_alone_and_takes_no_jobs_of_strangers(float32_run):
    folder, place, attacks, _ = float32_run
    if place.reason:
        pytest.skip(f"NOT RUN, sockets of a run: {place.reason}")
    # Sockets of Ray, of torch's stores and of gloo.
    assert len(place.listened) > 20 and place.beyond_loopback() == []
    assert attacks and all(attack == {"took": [], "entered": []} for attack in attacks)
    assert not (folder / "mark").exists()


# Plain Ray 2.46, with its agent on any free port; prints when it is ready and waits.
PLAIN_RAY = """
import ray, sys, tempfile
ray.init(num_cpus=1, include_dashboard=False, _temp_dir=tempfile.mkdtemp(prefix="ray-"))
sys.stdout.write("ready\\n"), sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.skipif(
    bool(python_of_workers()), reason="NOT RUN: Ray alone starts no worker with a Python at such a path"
)
def test_ray_as_it_comes_listens_everywhere_and_runs_the_job_of_a_stranger(tmp_path):
    """The control of the test above."""
    with surroundings() as place:
        if place.reason:
            pytest.skip(f"NOT RUN, sockets of a run: {place.reason}")
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        line = place.command([sys.executable, "-c", PLAIN_RAY])
        tmp_path.chmod(0o777)
        with subprocess.Popen(line, env=os.environ | place.variables, cwd=tmp_path, **streams) as process:
            while "ready" not in process.stdout.readline():
                assert process.poll() is None
            deadline = time.monotonic() + 60
            attack = {"took": []}
            # Ray reports that it is ready before its agent has started.
            while not attack["took"] and time.monotonic() < deadline:
                place.look()
                attack = place.stranger(place.temporary / "mark")
            while not (place.temporary / "mark").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            ran = (place.temporary / "mark").exists()
            process.communicate()
        assert len(attack["took"]) == 1 and ran and attack["entered"] and place.beyond_loopback()


@pytest.mark.parametrize("folder", ["/proc/foo", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_rejected_before_ray_starts(inputs, tmp_path, folder):
    line, environment, _ = command(inputs, folder)
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert f"measure.output_dir={folder} is invalid: not writable" in done.stderr.splitlines()[-1]


def test_missing_dies_reported_before_verl_waits(inputs, tmp_path):
    line, environment, mark = command(inputs, tmp_path)
    environment["NPU_EMULATOR_DEVICES"] = "2"
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "error: Ray has 2 of the 4 NPU slots that this run needs" in done.stderr
    assert not processes_with(mark)


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("raylet", "error: Ray ended during the run: its process raylet has gone"),
        ("worker", "error: "),
        ("disk", "mounted at {output}, is full (no space left): make room there"),
    ],
)
def test_a_run_that_loses_something_says_so_and_leaves_nothing(inputs, tmp_path, lost, says):
    said, _ = losing_run(inputs, tmp_path, lost)
    sentence = [text for text in said if text.startswith("error: ")][-1]
    assert says.format(output=tmp_path / "output") in sentence


def test_a_worker_that_is_stopped_is_named_and_ends_the_run(inputs, tmp_path):
    """The limits are small, and no other rank is reported."""
    watch = "actor_rollout_ref.overlay.watch"
    limits = (f"{watch}.interval_s=1", f"{watch}.warn_s.silent=15", f"{watch}.end_s.silent=30")
    said, stopped = losing_run(inputs, tmp_path, "stopped", *limits)
    (warning,) = [text for text in said if text.startswith("warning: rank")]
    (error,) = [text for text in said if text.startswith("error: ")]
    for text in (warning, error):
        place = r"(in \w+|between two phases)( of step \d+)?, last "
        named = rf"rank [01] \(process {stopped} on \S+\) has not answered for \d+ s {place}"
        assert re.search(named, text), text
    assert error.endswith("the run was ended")
    stops = read_faults(tmp_path / "output")
    assert [(stop["kind"], stop["ended"]) for stop in stops] == [("not_answering", False), ("not_answering", True)]
    assert len({(stop["rank"], stop["phase"]) for stop in stops}) == 1


def losing_run(inputs, tmp_path, lost, *overrides):
    """Take something away from a run in `tmp_path`/output, which must end with 1 and leave nothing. Return its output
    lines, and the process that was stopped or killed."""
    output, taken = tmp_path / "output", None
    output.mkdir()
    with surroundings() as place:
        line, environment, mark = command(inputs, output, "trainer.total_training_steps=1000", *TWO_DIES, *overrides)
        if lost == "disk" and not place.node:
            pytest.skip(f"NOT RUN, a full disk: {place.reason}")
        if lost == "disk":
            line = on_small_disk(output, "2m", *line)
        with (tmp_path / "said").open("w") as said:
            streams = {"stdout": said, "stderr": subprocess.STDOUT, "text": True}
            with subprocess.Popen(
                place.command(line), env=environment | place.variables, cwd=tmp_path, **streams
            ) as process:
                seen = Path(f"/proc/{process.pid}/root/{output}")
                wait_for_event(process, seen, "training_begins", tmp_path / "said")
                if lost == "disk":
                    fill(seen / "filler")
                else:
                    taken = victim(lost, process.pid, place)
                    os.kill(taken, signal.SIGSTOP if lost == "stopped" else signal.SIGKILL)
                process.wait(300)
        left = processes_with(mark) + place.left()
    said = (tmp_path / "said").read_text()
    assert process.returncode == 1, said[-4000:]
    assert left == []
    return said.splitlines(), taken


def fill(path):
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def victim(name, run, place):
    """Return the raylet of a run, or a worker that holds vLLM's shared memory."""
    while True:
        for process in descendants(run):
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
                maps = Path(f"/proc/{process}/maps").read_text() if name != "raylet" else ""
                if words[0].endswith("/raylet/raylet") if name == "raylet" else place.temporary.name + "-run-" in maps:
                    return process


def test_float32_run_is_exact_at_every_step(float32_run):
    tmp_path, *_ = float32_run
    steps = records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3]
    for metrics in (record["metrics"] for record in steps):
        assert metrics["reshard/weights_exact"] == 1
        assert 0 < metrics["training/rollout_logprob_diff_max"] < 1e-3
        assert metrics["overlay/patches_ineffective"] == 0
        assert metrics["actor/nonfinite_steps"] == 0
        assert not any(name.startswith(("actor/entropy_loss", "training/rollout_probs_diff")) for name in metrics)
        assert metrics["memory/peak_bytes/update"] > 0 and metrics["timing_s/reshard"] > 0
    overlay = json.loads((tmp_path / "overlay.json").read_text())
    assert not overlay["problems"] and all(overlay["effective"].values())
    events = [record["event"] for record in records(tmp_path / "events.jsonl")]
    assert events == [
        "ray_ready",
        "data_ready",
        "reference_ready",
        "rollout_ready",
        "models_ready",
        "training_begins",
        "ended",
    ]
    assert "finished" in (tmp_path / "report.html").read_text()
    assert [len(step.samples) > 0 for step in read_samples(tmp_path)] == [True, True]
    assert len(list((tmp_path / "memory").iterdir())) == 4
    assert (tmp_path / "config.yaml").exists() and list((tmp_path / "tensorboard").iterdir())


def failed_run(inputs, output, *overrides, **variables):
    """Run with a fault, which must make the run fail. Return the last error and everything that was printed."""
    precision = "actor_rollout_ref.overlay.precision=float32"
    line, environment, _ = command(inputs, output, precision, *TWO_DIES, *overrides)
    environment |= variables
    line = command_of(line[3:], environment)
    done = subprocess.run(line, env=environment, cwd=output, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    (error,) = [said for said in done.stderr.splitlines() if said.startswith("error: ")]
    return error, done.stdout + done.stderr


def test_faults_ignored_by_verl_fail_the_run(inputs, tmp_path):
    """verl calls a reward function that raises once again; one that returns NaN makes every later update skip."""
    reward = Path(__file__).with_name("faulty_reward.py")
    steps = "trainer.total_training_steps=2"
    error, printed = failed_run(inputs, tmp_path, setting("custom_reward_function.path", reward), steps)
    assert error.startswith(
        "error: the run is not valid: the reward function failed once at step 1 (ValueError: the sandbox did not "
        "answer); 1 update was skipped at step 2, because gradients contained inf or nan; metrics were not finite: "
    )
    assert "warning: the reward function failed once at step 1" in printed and "Traceback" not in printed
    metrics = read_records(tmp_path / "metrics.jsonl")
    assert [record.metrics["reshard/weights_exact"] for record in metrics] == [1, 1]
    facts = RunFacts(seed=1, dies=2, wall_s=1.0, precision="float32")
    summary = summarise(metrics, facts, faults=read_faults(tmp_path))
    assert (summary["updates_skipped"], summary["reward_errors"]) == (1, 1)
    assert summary["nonfinite_metrics"]["actor/grad_norm"] == [2]


def test_strict_mode_holds_in_the_workers_of_a_run(inputs, tmp_path):
    """A worker passes float32 to kernels for 16 bits, as in `float32_run`, whose environment allows that."""
    error, printed = failed_run(inputs, tmp_path, NPU_EMULATOR_STRICT="1")
    rejected = re.findall(r"EZ1001\): Tensor (\w+) must be float16 or bfloat16", printed)
    assert rejected and re.search(r"ray::\w*WorkerDict", printed), printed[-4000:]
    assert re.fullmatch(r"error: \w+: AclNN_Parameter_Error\(EZ1001\): Tensor \w+ must be float16 or bfloat16\.", error)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_one_value_of_the_weights_that_is_not_a_number_ends_it_before_training(inputs, tmp_path):
    model = shutil.copytree(inputs[0], tmp_path / "model")
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    error, _ = failed_run((model, inputs[1]), tmp_path)
    assert error == (
        "error: before training, the reference policy's weights contain inf or nan in "
        "decoder.layers.1.self_attention.linear_proj.weight (rank 0); verify the loaded files "
        f"(actor_rollout_ref.model.path={model})"
    )
    assert not (tmp_path / "metrics.jsonl").exists()


# tests/post_training has every signal, without a run: test_interrupts.py and processes/test_command.py.
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGQUIT, 131, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_stops_all_that_was_started(inputs, tmp_path, number, code):
    with surroundings() as place:
        line, environment, mark = command(inputs, tmp_path)
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # A signal that was ignored when Python started stays ignored, as some are for a shell's background jobs.
        outputs["preexec_fn"] = lambda: signal.signal(number, signal.SIG_DFL)
        with subprocess.Popen(
            place.command(line), env=environment | place.variables, cwd=tmp_path, **outputs
        ) as process:
            for said in process.stdout:
                if "(TaskRunner" in said:
                    break
            assert len(processes_with(mark)) > 2
            process.send_signal(number)
            process.stdout.read()
            assert process.wait(120) == code
        assert processes_with(mark) + place.left() == []
