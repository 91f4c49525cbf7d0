"""A resumed rehearsal keeps the run's options, and counts all its steps, whenever they were trained."""

import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from post_training.report import LoggedStep
from rehearsal.__main__ import parse_arguments
from rehearsal.display import Progress, make_console
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.plan import ROOT, Options, make_plan
from rehearsal.stages import Rehearsal, check_before_anything, failure_of
from tests.rehearsal.command import run_rehearsal
from tests.verl_patches.trainer.test_run import MARKER


@pytest.fixture
def begun(tmp_path):
    """The folder of a run with non-default options."""
    choices = Options(steps=8, seed=3, dies=8, output=tmp_path, overrides=("trainer.save_freq=2",))
    choices.write(tmp_path / OPTIONS_NAME)
    return tmp_path


def test_run_continues_with_its_own_options(begun):
    options, dry_run = parse_arguments(["--resume", str(begun), "--", "trainer.save_freq=4"])
    assert not dry_run and (options.steps, options.seed, options.dies, options.output) == (8, 3, 8, begun)
    assert options.overrides == ("trainer.save_freq=2", "trainer.save_freq=4")
    plan = make_plan(options, "time")
    assert plan.output == begun and "trainer.resume_mode=auto" in plan.overrides
    check_before_anything(plan)


def test_a_new_run_does_not_go_on_from_anything(tmp_path):
    plan = make_plan(Options(output=tmp_path / "run"), "time")
    assert not any("resume_mode" in override for override in plan.overrides)
    assert f"trainer.default_local_dir={tmp_path / 'run' / 'checkpoints'}" in [
        o.replace("'", "") for o in plan.overrides
    ]


def test_data_of_the_users_own_are_remembered(tmp_path):
    Options(data=tmp_path / "problems.jsonl").write(tmp_path / OPTIONS_NAME)
    assert Options.of_run(tmp_path, ()).data == tmp_path / "problems.jsonl"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "9"], "--resume keeps the options of the run; remove --steps"),
        (["--device-memory", "9"], "--resume keeps the options of the run; remove --device-memory"),
    ],
)
def test_other_options_rejected(begun, arguments, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--resume", str(begun), *arguments])
    assert end.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"data": null, "overrides": [], "colour": 1}'])
def test_folder_without_a_run_rejected(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / OPTIONS_NAME).write_text(content)
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--resume", str(tmp_path)])
    assert end.value.code == 2
    assert (
        f"--resume {tmp_path} is not the folder of a rehearsal, which has a rehearsal.json" in capsys.readouterr().err
    )


def record(step, at=100.0):
    return LoggedStep(step, at, {"timing_s/step": 2.0})


def test_a_run_is_judged_by_the_steps_that_it_reached_and_not_by_how_many_it_trained_itself(tmp_path):
    log = tmp_path / "run.log"
    assert failure_of(0, [record(3), record(4)], 4, "bfloat16", log) is None
    assert failure_of(0, [record(1), record(2)], 4, "bfloat16", log) == "The run ended after 2 of 4 steps"
    assert failure_of(0, [], 4, "bfloat16", log) == "The run ended after 0 of 4 steps"


def test_the_start_is_timed_from_this_launch(tmp_path):
    lines = [
        json.dumps({"step": step, "time": at, "metrics": {"timing_s/step": 2.0}}) for step, at in ((1, 50), (2, 130))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    events = [json.dumps({"time": at, "event": "training_begins"}) for at in (40, 120)]
    (tmp_path / "events.jsonl").write_text("\n".join(events) + "\n")
    progress = Progress(make_console(), tmp_path, 2, launched=100.0)
    progress.update()
    assert progress.startup_seconds() == 28.0 and progress.event_seconds() == {"training_begins": 20.0}


@pytest.fixture
def marked(tmp_path):
    """An environment with a mark by which every process of the test is found, and killed at its end in any case."""
    mark = tmp_path.name + str(os.getpid())
    yield os.environ | {MARKER: mark}, mark
    kill_all(mark)


@pytest.mark.slow
def test_killed_rehearsal_continues_to_its_last_step(tmp_path, marked):
    """Kill every process after the first checkpoint; the second command, with the tests' imports, completes the run."""
    output, (environment, mark) = tmp_path / "run", marked
    megatron = "actor_rollout_ref.actor.megatron"
    one_stage = [
        f"{megatron}.pipeline_model_parallel_size=1",
        f"{megatron}.override_transformer_config.num_layer_list=[3]",
    ]
    options = ["--steps", "2", "--dies", "2", "--output", str(output), "--", *one_stage]
    command = ["bash", str(ROOT / "scripts" / "rehearse.sh"), *options]
    with (tmp_path / "said").open("w") as said:
        first = subprocess.Popen(
            [*command, "trainer.save_freq=1", "data.train_batch_size=8"],
            env=environment, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_for(first, output / "checkpoints" / "global_step_1", tmp_path / "said")
        kill_all(mark)
        first.wait(60)
    said_by_second = run_rehearsal("--resume", str(output))
    assert "Continuing after step" in said_by_second and "Done in" in said_by_second
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2] and json.loads((output / "summary.json").read_text())["steps"] == 2


def wait_for(process, folder, said):
    deadline = time.monotonic() + 900  # on a loaded machine its checkpoint alone took 195 s
    while not folder.exists():
        assert time.monotonic() < deadline and process.poll() is None, said.read_text()[-3000:]
        time.sleep(0.05)


def kill_all(mark):
    """Send SIGKILL to every process with the mark until none is left, for at most a minute."""
    needle, deadline = f"{MARKER}={mark}".encode(), time.monotonic() + 60
    while time.monotonic() < deadline:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if needle in (place / "environ").read_bytes():
                    found.append(int(place.name))
            except (OSError, PermissionError):
                continue
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    raise AssertionError(f"processes {found} cannot be killed")


@pytest.mark.parametrize(
    ("named", "kept", "said"),
    [
        (None, [], "Continuing at step 1, because {checkpoints} has no complete checkpoint"),
        ("global_step_2", [1, 2], "Continuing after step 2"),
    ],
)
def test_records_of_steps_that_are_trained_again_are_taken_back(tmp_path, named, kept, said):
    checkpoints = tmp_path / "[bold]checkpoints"
    (checkpoints / "global_step_4").mkdir(parents=True)
    lines = [json.dumps({"step": step, "time": 1.0, "metrics": {}}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    printed = io.StringIO()
    options = {"default_local_dir": str(checkpoints), "resume_mode": "resume_path" if named else "auto"}
    options["resume_from_path"] = named and str(checkpoints / named)
    rehearsal = Rehearsal(Console(file=printed, width=1000, markup=False), None, 0.0)
    rehearsal._go_back(SimpleNamespace(output=tmp_path), options)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == kept
    *skipped, last = printed.getvalue().splitlines()
    assert last == said.format(checkpoints=checkpoints)
    # A named checkpoint is used, whatever else is there; paths are printed without markup.
    assert len(skipped) == (named is None) and all(str(checkpoints) in line for line in skipped)
