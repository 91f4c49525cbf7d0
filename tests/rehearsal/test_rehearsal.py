"""The rehearsal from plan to report, around a fake training, and the options that it rejects before starting."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from post_training.data import DataError, Problem, to_row
from post_training.data.parquet import write_files
from post_training.environment_files import read_environment
from post_training.models.families import find_family, sizes_of
from post_training.report import LoggedStep
from rehearsal.__main__ import parse_arguments
from rehearsal.display import format_duration, format_row
from rehearsal.jobs import JOBS
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.lengths import measured_settings
from rehearsal.plan import Options, checkpoint_folder, make_plan
from rehearsal.preflight import (
    PreflightError,
    check_device_memory,
    check_output,
    check_rows,
    compose_checked,
    count_parameters,
    is_whole,
)
from rehearsal.stages import check_before_anything
from rehearsal.tiny_model.architecture import TINY_MODELS, reads_images

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = "\n".join(json.dumps({"problem": f"{n}+1", "answer": str(n + 1)}) for n in range(80))
# Runs the real rehearsal with a fake training run and checkpoint. Arguments: the mode, then those of rehearse.sh.
LAUNCHER = f"""
import sys
from pathlib import Path
from post_training.processes import command as processes
from rehearsal import __main__ as rehearsal, plan
processes._REMAINING_GRACE_S = 0.2
mode = sys.argv.pop(1)
class Fake(plan.RehearsalPlan):
    def checkpoint_command(self):
        return ["mkdir", "-p", str(self.checkpoint)]
    def data_command(self):
        command = [sys.executable, "scripts/json_to_parquet.py", "--output_dir", str(self.output / "data")]
        return [*command, "--json_path", str(self.output.parent / "problems.jsonl")]
    def run_command(self):
        return [sys.executable, "tests/scripts/fake_training.py", mode, str(self.output), str(self.options.steps)]
plan.RehearsalPlan = Fake
plan.checkpoint_key = lambda model_type: "test-{os.getpid()}"
sys.exit(rehearsal.main())
"""


def start(folder, mode, *arguments, **variables):
    (folder / "problems.jsonl").write_text(PROBLEMS)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, mode, "--steps", "3", "--output", folder / "run", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "60", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(autouse=True)
def remove_fake_checkpoint():
    yield
    checkpoint = ROOT / ".cache" / "checkpoints" / f"test-{os.getpid()}"
    if checkpoint.exists():
        checkpoint.rmdir()


def test_good_run_shows_every_step_and_writes_the_report(tmp_path):
    running = start(tmp_path, "good", "--seed", "7")
    output, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    rows = [line.split()[0] for line in output.splitlines() if "/3 " in line]
    assert rows == ["1/3", "2/3", "3/3"]
    assert "\x1b" not in output and "Ray is up" in output and "Done in" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    keys = "seed steps dies wall_s reward_first reward_last stage_seconds rollout_logprob_diff_max weights_exact"
    keys += " patches_applied patches_effective peak_device_bytes collectives"
    assert set(keys.split()) <= set(summary)
    stages = "rollout old_log_prob ref values reward adv update_critic update reshard offload"
    assert set(summary["stage_seconds"]) == set(stages.split())
    assert (summary["seed"], summary["steps"], summary["dies"], summary["weights_exact"]) == (7, 3, 4, True)
    assert (tmp_path / "run" / "report.png").stat().st_size > 1000
    assert "3 of 3 steps" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("mode", "message"),
    [("failing", "a die ran out of device memory"), ("short", "ended after 1 of 3 steps")],
)
def test_failed_run_is_one_sentence_and_the_log(tmp_path, mode, message):
    running = start(tmp_path, mode)
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 1
    first, second = errors.splitlines()
    assert first.startswith("error: ") and message in first
    assert second == f"Whole log: {tmp_path}/run/logs/run.log"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert message in summary["failure"] and summary["steps"] == 1
    assert message in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("skipping", "1 update was skipped at step 2"),
        ("nan", "metrics were not finite: training/rollout_logprob_diff_max at step 2"),
        ("uncompared", "no log-prob of rollout and training was compared at step 2"),
        ("inexact", "rollout weights differed from training weights at step 2"),
    ],
)
def test_metrics_that_no_good_run_has_make_it_fail(tmp_path, mode, message):
    """The rehearsal checks the metrics itself, although the training's driver reported success."""
    running = start(tmp_path, mode)
    output, errors = running.communicate(timeout=600)
    assert running.returncode == 1 and f"error: the run is not valid: {message}" in errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def short_folder():
    """An own folder for temporary files, with a short path for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def shared_memory_of(folder):
    """Return the shared-memory files of runs with temporary files in `folder`, and of the fake training's dies."""
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [name for name in names if f"tmp-{folder.name}" in name or name.endswith("-of-the-fake-training")]


def test_a_killed_rehearsal_leaves_a_folder_that_the_next_one_removes(tmp_path, short_folder):
    running = start(tmp_path, "endless", TMPDIR=str(short_folder))
    wait_for_worker(tmp_path, running)
    (left,) = short_folder.glob("rehearsal-*")
    assert left.stat().st_mode & 0o777 == 0o700
    account = Path(f"/dev/shm/npu_emulator-0-{left.name}")
    account.touch()
    running.kill()
    running.communicate()
    worker = int((tmp_path / "run" / "worker").read_text())
    os.kill(worker, signal.SIGKILL)
    (tmp_path / "next").mkdir()
    following = start(tmp_path / "next", "good", TMPDIR=str(short_folder))
    assert following.communicate(timeout=600) and following.returncode == 0
    assert not list(short_folder.iterdir()) and not account.exists()


def wait_for_worker(tmp_path, running):
    worker_file = tmp_path / "run" / "worker"
    deadline = time.monotonic() + 60
    while not worker_file.exists() or not worker_file.read_text():
        assert time.monotonic() < deadline and running.poll() is None, running.communicate()
    return int(worker_file.read_text())


def test_interrupt_leaves_nothing_running(tmp_path, short_folder):
    running = start(tmp_path, "endless", TMPDIR=str(short_folder))
    worker = wait_for_worker(tmp_path, running)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 130 and "has been stopped" in errors
    assert not is_running(worker)
    assert not list(short_folder.iterdir()) and not shared_memory_of(short_folder)


def rejection(*overrides, **options):
    with pytest.raises(PreflightError) as caught:
        compose_checked(make_plan(Options(overrides=overrides, **options), "time"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ray_init.num_cpus=3", "ray_init.num_cpus=3 is too low for Ray to place 4 workers"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3", "TP x PP x CP is 6"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=512", "Set it to a divisor of 256"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "recompute_old_log_prob=False is exact only with one update"),
        ("+actor_rollout_ref.overlay.reshrad.enabled=true", "unknown key actor_rollout_ref.overlay.reshrad"),
        ("data.sede=1", "unknown key data.sede, which nothing reads; did you mean data.seed?"),
        ("fast", "fast"),
        ("trainer.total_training_steps=many", "total_training_steps=many is invalid: it should be a valid integer"),
        (
            "trainer.total_training_steps=null",
            "trainer.total_training_steps=null is invalid. Set it to the number of steps",
        ),
        ("trainer.logger=[console,swanlab]", "its package swanlab is not installed"),
        ("actor_rollout_ref.model.path=/nosuch", "model.path=/nosuch is invalid: not a folder with a config.json"),
        ("custom_reward_function.path=/nosuch.py", "custom_reward_function.path=/nosuch.py is not a file"),
    ],
)
def test_configuration_that_cannot_run_rejected(override, message):
    assert message in rejection(override)


@pytest.mark.parametrize("model", sorted(TINY_MODELS))
def test_the_rehearsal_of_each_family_is_composed_and_checked(model):
    config = compose_checked(make_plan(Options(model=model), "time"))["actor_rollout_ref"]
    experts = sizes_of(TINY_MODELS[model]).experts
    assert config["overlay"]["rollout"]["expert_parallel_size"] == (4 if experts else 1)
    megatron = config["actor"].get("megatron", {})
    assert bool(megatron.get("override_transformer_config")) == bool(experts)
    assert ("fsdp_config" in config["actor"]) == reads_images(model)
    assert find_family(TINY_MODELS[model]).architecture in TINY_MODELS[model]["architectures"]


def test_data_of_text_for_a_model_with_images_rejected(capsys, tmp_path):
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "qwen2_5_vl", "--data", str(tmp_path / "gsm8k.jsonl")])
    assert "gsm8k.jsonl is invalid: the model is trained on drawn images" in capsys.readouterr().err
    options, _ = parse_arguments(["--model", "qwen2_5_vl"])
    assert options.dies == 2 and make_plan(options, "time").job.configuration == "rehearsal_images"


def test_options_foreign_to_a_family_rejected():
    stages = "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list"
    assert "verl builds Qwen3. Remove the key" in rejection(f"+{stages}=[3,1]", model="qwen3")


def test_rejected_dies_end_the_launcher_before_anything_is_made(tmp_path):
    running = start(tmp_path, "good", "--dies", "3")
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 2
    assert errors.startswith("error: 3 dies do not divide into whole training replicas: TP x PP x CP is 4.")
    assert errors.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [None, "", '{"text": 1}', "{"])
def test_bad_data_file_rejected_before_anything_is_made(tmp_path, content):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    plan = make_plan(Options(data=path, output=tmp_path / "run"), "time")
    with pytest.raises(DataError, match="bad.jsonl"):
        check_before_anything(plan)
    assert not (tmp_path / "run").exists()


def test_fewer_rows_than_a_step_takes_rejected(tmp_path):
    plan = make_plan(Options(output=tmp_path), "time")
    problems = [Problem(f"{n}+1", str(n + 1)) for n in range(7)]
    rows = [to_row(problem, index, "train", "own", "") for index, problem in enumerate(problems)]
    for path in (plan.train_data, plan.test_data):
        write_files({path: rows})
    config = {"data": {"train_batch_size": 7}, "trainer": {"n_gpus_per_node": 4}}
    check_rows(plan, config)
    with pytest.raises(PreflightError, match="data.train_batch_size=8 is invalid: .* 7 training rows. Use more data"):
        check_rows(plan, {**config, "data": {"train_batch_size": 8}})


def test_folder_of_another_run_rejected(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("kept\n")
    with pytest.raises(PreflightError, match="is not an empty folder. Choose another one"):
        check_before_anything(make_plan(Options(output=tmp_path), "time"))


@pytest.fixture
def read_only():
    """A read-only file system; only root can mount it."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"NOT RUN: mounting needs privileges that are not here: {made.stderr.strip()}")
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("folder", ["/proc/foo", "/dev/null/x", "/dev/null", f"/tmp/{'n' * 300}", "/proc/1/a/b"])
def test_an_output_that_cannot_be_written_is_one_sentence_before_anything(tmp_path, folder):
    running = start(tmp_path, "good", "--output", folder)
    output, errors = running.communicate(timeout=600)
    assert (running.returncode, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("error: ") and f"--output={folder} " in errors and "Choose " in errors


def test_an_output_on_a_file_system_that_is_read_only_rejected(read_only):
    with pytest.raises(PreflightError, match="run cannot be written .Read-only file system.. Choose a writable folder"):
        check_output(read_only / "run")


def test_the_check_of_the_output_leaves_nothing_and_accepts_what_can_be_made(tmp_path):
    check_output(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_device_memory_must_hold_the_training_state():
    check_device_memory(parameters=2**20, dies=4, capacity_mb=5)
    with pytest.raises(PreflightError, match="--device-memory=4 is invalid: .*take 5 MiB.* Set it to at least 10"):
        check_device_memory(parameters=2**20, dies=4, capacity_mb=4)


def test_parameters_are_counted_from_headers(tmp_path):
    first = {"a": numpy.zeros((3, 5), numpy.float32), "b": numpy.zeros(7, numpy.float16)}
    save_file(first, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"c": numpy.zeros((2, 1), numpy.float32)}, tmp_path / "model-2.safetensors")
    assert count_parameters(tmp_path) == 24


def test_user_overrides_win_over_every_other():
    plan = make_plan(Options(steps=5, overrides=("trainer.total_training_steps=9",)), "time")
    widened = plan.with_overrides(["data.max_prompt_length=64"])
    assert widened.overrides[-2:] == ("data.max_prompt_length=64", "trainer.total_training_steps=9")
    assert "trainer.total_training_steps=5" in widened.overrides[:-2]


@pytest.mark.parametrize(("precision", "strict"), [("bfloat16", "1"), ("float32", "float32")])
def test_operators_are_strict_and_collectives_complete_at_wait_only(precision, strict):
    plan = make_plan(Options(overrides=(f"actor_rollout_ref.overlay.precision={precision}",)), "time")
    assert plan.environment()["NPU_EMULATOR_STRICT"] == strict
    assert plan.environment()["NPU_EMULATOR_DEFERRED_COLLECTIVES"] == "1"


def test_streams_have_a_seed_only_where_one_was_asked_for():
    """The user's shell does not set the seed, so that a run's options always record it."""
    assert make_plan(Options(stream_seed=7), "time").environment()["NPU_EMULATOR_STREAM_SEED"] == "7"
    assert make_plan(Options(), "time").environment()["NPU_EMULATOR_STREAM_SEED"] == ""
    options, _ = parse_arguments(["--stream-seed", "0"])
    assert options.stream_seed == 0


def test_chip_is_that_of_the_option_and_kept_for_a_resume(tmp_path):
    assert make_plan(Options(), "time").environment()["NPU_EMULATOR_CHIP"] == "Ascend910_9391"
    options, _ = parse_arguments(["--chip", "a2", "--output", str(tmp_path)])
    assert make_plan(options, "time").environment()["NPU_EMULATOR_CHIP"] == "Ascend910B3"
    options.write(tmp_path / OPTIONS_NAME)
    assert Options.of_run(tmp_path, ()).chip == "a2"


def test_rehearsal_on_an_atlas_a2_is_checked_for_it():
    """The default is eager; a graph over four dies would need a token exchange that only an Atlas A3 has."""
    compose_checked(make_plan(Options(chip="a2"), "time"))
    graph = "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.torchair_graph_config.enabled=true"
    eager = "actor_rollout_ref.rollout.enforce_eager=false"
    free = "actor_rollout_ref.rollout.free_cache_engine=false"
    compose_checked(make_plan(Options(overrides=(graph, eager, free)), "time"))
    said = rejection(graph, eager, free, chip="a2")
    assert "torchair_graph_config.enabled=true is invalid: experts are on 4 dies of an Atlas A2" in said
    assert "+graph=off" in said


def test_every_variable_of_the_environment_file_is_read_by_the_software_it_names():
    text = (ROOT / "scripts" / "env" / "rehearsal.env").read_text()
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name = line.split("=")[0]
        reader = line.partition("# ")[2].partition(":")[0]
        if reader == "python":
            continue
        package = Path(next(iter(importlib.util.find_spec(reader).submodule_search_locations)))
        known = subprocess.run(["grep", "-rqF", name, package], stdout=subprocess.DEVNULL).returncode == 0
        assert known, f"nothing in {reader} reads {name}"
    assert read_environment(ROOT / "scripts" / "env" / "rehearsal.env")["OMP_NUM_THREADS"] == "1"


def test_row_without_measurements_and_without_unicode():
    bare = format_row(LoggedStep(1, 0.0), 25)
    assert bare.startswith("   1/25      - ░") and bare.endswith("-")
    full = format_row(LoggedStep(12, 0.0, {"critic/score/mean": 0.5, "timing_s/step": 3.456}), 25, "ascii")
    assert full.startswith("  12/25  0.500 ####....") and full.endswith("3.46")
    assert len(bare) == len(full) == 79 and format_duration(125.7) == "2:05"


def test_lengths_follow_the_data(tmp_path):
    """Real prompts are measured with the tiny tokenizer; verl's filter drops those above the limit."""
    from rehearsal.tiny_model.tokenizer import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path / "checkpoint")
    lengths = {}
    for name, question in {"short": "1+1", "long": "word " * 500}.items():
        write_files({tmp_path / name: [to_row(Problem(question, "2"), 0, "train", "own", "")]})
        chosen = dict(entry.split("=") for entry in measured_settings(tmp_path / name, tmp_path / "checkpoint", dies=4))
        lengths[name] = int(chosen["data.max_prompt_length"])
        plan = make_plan(Options(), "time").with_overrides(f"{key}={value}" for key, value in chosen.items())
        rollout = compose_checked(plan)["actor_rollout_ref"]["rollout"]
        assert rollout["max_model_len"] == lengths[name] + int(chosen["data.max_response_length"])
    assert 3 <= lengths["short"] < 16 and lengths["long"] == 256


@pytest.mark.parametrize("job", JOBS)
def test_every_job_takes_the_lengths_of_other_data(tmp_path, job):
    from rehearsal.tiny_model.tokenizer import build_tokenizer

    dies = JOBS[job].dies
    build_tokenizer().save_pretrained(tmp_path)
    write_files({tmp_path / "data": [to_row(Problem("1+1", "2"), 0, "train", "own", "")]})
    measured = measured_settings(tmp_path / "data", tmp_path, dies)
    config = compose_checked(make_plan(Options(job=job, dies=dies), "time").with_overrides(measured))
    assert config["data"]["train_batch_size"] == 2 * dies
    assert config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == 2 * dies


def test_the_sizes_of_the_model_are_checked_before_it_is_made():
    assert "adds up to 10 layers" in rejection(
        "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[5,5]"
    )


def test_truncated_checkpoint_detected(tmp_path):
    assert not is_whole(tmp_path) and not is_whole(tmp_path / "absent")
    save_file({"a": numpy.zeros((3, 5), numpy.float32)}, tmp_path / "model.safetensors")
    assert not is_whole(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert is_whole(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for content in (whole[:3], b"", whole[:-1], whole + b"x", b"\xff" * 64, whole[:40]):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert not is_whole(tmp_path)
        with pytest.raises(PreflightError, match="model.safetensors is .*make the model again"):
            count_parameters(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "config.json").write_text('{"a"')
    assert not is_whole(tmp_path)


def test_user_who_cannot_write_the_checkout_keeps_checkpoints_at_home(tmp_path, monkeypatch):
    """Another user reads the owner's checkpoints if they are readable; the owner makes new ones in the checkout."""
    shared, key = tmp_path / "checkout" / ".cache" / "checkpoints", "0123"
    assert checkpoint_folder(key, tmp_path / "checkout") == shared / key
    (shared / "made").mkdir(parents=True)
    (shared / "made" / "model.safetensors").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    closed = {shared}
    monkeypatch.setattr(
        os, "access", lambda path, mode: not (mode & os.W_OK) and Path(path).exists() and path not in closed
    )
    own = tmp_path / "cache" / "rehearsal" / "checkpoints"
    assert checkpoint_folder(key, tmp_path / "checkout") == own / key
    assert checkpoint_folder("made", tmp_path / "checkout") == shared / "made"
    closed.add(shared / "made" / "model.safetensors")
    assert checkpoint_folder("made", tmp_path / "checkout") == own / "made"
