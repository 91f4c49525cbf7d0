"""The resume proof: kill points are drawn, a process is stopped at the right place, and differences are found."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from pyarrow.parquet import read_metadata

from post_training.processes.command import SignalFlag
from rehearsal.plan import ROOT
from rehearsal.resume_proof import runs as runs_of_a_proof
from rehearsal.resume_proof import stops
from rehearsal.resume_proof.comparison import compare, digests_of, metrics_of
from rehearsal.resume_proof.points import DRIVER_PLACES, KILLED, WORKER_PLACES, Point, draw_points
from rehearsal.resume_proof.record import ProofRecord, Row
from rehearsal.resume_proof.stops import AFTER_RENAME, BEFORE_RENAME, CHUNK, FILE, Stop, reach
from scripts import prove_resume
from verl_patches.features import settings
from verl_patches.features.measure.feature import MeasureSettings

PLACES = (*WORKER_PLACES, *DRIVER_PLACES)


def test_relative_path_is_of_the_users_folder(tmp_path, monkeypatch):
    """Each run of a proof starts in its own folder."""
    monkeypatch.chdir(tmp_path)
    options = prove_resume._options(["--config-name", "rehearsal", "custom_reward_function.path=reward.py"])
    assert options.overrides == [f"custom_reward_function.path={tmp_path / 'reward.py'}"]


def test_points_are_drawn_over_all_that_is_killed_and_all_places():
    points = draw_points(32, 7, 4, 3, PLACES)
    assert points == draw_points(32, 7, 4, 3, PLACES) != draw_points(32, 8, 4, 3, PLACES)
    for first in range(0, 32, 4):
        assert {point.killed for point in points[first : first + 4]} == set(KILLED)
    for first in range(0, 32, 8):
        assert {point.stop.place for point in points[first : first + 8]} == set(PLACES)
    for point in points:
        first = 3 if point.stop.place in ("rollout", "reward", "ref") else 2
        assert first <= point.stop.step <= (2 if point.stop.place == AFTER_RENAME else 3)
        assert (point.stop.rank == -1) == (point.stop.place in DRIVER_PLACES) and point.stop.rank < 4
        assert point.stop.number == 1 or point.stop.place == CHUNK


@pytest.fixture
def runs(tmp_path):
    """Two runs of two steps with identical files."""

    def written(name, **changed):
        folder = tmp_path / name
        manifest = folder / "checkpoints" / "global_step_2" / "actor" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"files": {"rank": {"sha256": changed.pop("sha256", "a"), "bytes": 1}}}))
        steps = [{"step": step, "metrics": {"actor/lr": 0.1 * step, "timing_s/step": len(name), "collectives/all": 4}}
                 for step in changed.pop("steps", (1, 2))]  # fmt: skip
        for key, value in changed.items():
            steps[int(key[-1]) - 1]["metrics"][key[:-2].replace("__", "/")] = value
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return folder

    return written


def test_runs_are_equal_whatever_a_clock_says(runs):
    result = compare(runs("one"), runs("another"), 2)
    assert (result.steps, result.metrics, result.differing) == (2, 4, ())


@pytest.mark.parametrize(
    ("changed", "differing"),
    [
        ({"actor__lr_2": 0.2000000001}, "step 2: actor/lr"),
        ({"actor__lr_1": None}, "step 1: actor/lr"),
        ({"collectives__all_1": 9}, "step 1: collectives/all"),
        ({"collectives__all_2": 9}, "step 2: collectives/all"),  # also for the step at which the run resumed
        ({"actor__new_2": 1}, "step 2: actor/new"),
        ({"sha256": "b"}, "weights, optimizer or random numbers after the last step"),
        ({"steps": (1,)}, "step 2 is only in one run"),
    ],
)
def test_any_difference_is_found(runs, changed, differing):
    one, another = runs("one"), runs("another", **changed)
    assert compare(one, another, 2).differing == compare(another, one, 2).differing == (differing,)


def test_a_step_that_is_there_twice_is_an_error(runs):
    with pytest.raises(ValueError, match="has step 2 twice"):
        compare(runs("one"), runs("another", steps=(1, 2, 2)), 2)


def test_a_proof_goes_on_with_the_points_that_were_equal(tmp_path):
    one, another = draw_points(2, 0, 4, 3, PLACES)
    record = ProofRecord(tmp_path / "proof.json", "a command")
    assert record.equal(one) is None
    equal, differing = Row(str(one), 2, 3, 90, ()), Row(str(another), 1, 3, 90, ("step 2: actor/lr",))
    record.add(equal)
    record.add(differing)
    again = ProofRecord(tmp_path / "proof.json", "a command")
    assert again.equal(one) == equal and again.equal(another) is None
    assert ProofRecord(tmp_path / "proof.json", "another command").equal(one) is None


def test_the_unbroken_run_is_of_this_command_and_begins_in_an_empty_folder(tmp_path, monkeypatch):
    def train(shrunk, place, while_running, resumes, signals):
        folder = shrunk.folder / place
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(shrunk.name)
        return 0 if shrunk.name != "ended" else 1

    monkeypatch.setattr(runs_of_a_proof.Shrunk, "train", train)

    def metrics_of(name):
        shrunk = runs_of_a_proof.Shrunk(name, (), 4, tmp_path, 60.0)
        return (runs_of_a_proof.train_unbroken(shrunk, None) / "metrics.jsonl").read_text()

    assert metrics_of("one") == "one"
    (tmp_path / "unbroken" / "metrics.jsonl").write_text("kept")
    assert metrics_of("one") == "kept", "the same command does not train it again"
    with pytest.raises(runs_of_a_proof.ProofError, match="the unbroken run ended with 1"):
        metrics_of("ended")
    assert metrics_of("one") == "one"


@pytest.mark.parametrize(
    ("reaches", "statuses", "ends"),
    [
        (True, [-9, 0], 3),
        (False, [-9, 0], "the run ended with -9 before"),
        (True, [0, 0], "the run ended with 0 although the signal was sent to worker"),
        (False, [0, 0], "the run ended with 0 before"),
        (True, [-9, 1], "the resumed run ended with 1"),
    ],
)
def test_a_run_is_killed_once_at_its_point_and_goes_on_from_its_checkpoint(
    tmp_path, monkeypatch, reaches, statuses, ends
):
    resumed, killed = [], []

    def train(shrunk, place, while_running, resumes, signals):
        resumed.append(resumes)
        if reaches and not resumes:
            (shrunk.folder / place / runs_of_a_proof.REACHED_NAME).write_text('{"pid": 7}')
        while_running()
        while_running()
        return statuses[len(resumed) - 1]

    monkeypatch.setattr(runs_of_a_proof.Shrunk, "train", train)
    monkeypatch.setattr(runs_of_a_proof, "kill_one", lambda process, pid: killed.append((process, pid)))
    monkeypatch.setattr(runs_of_a_proof, "newest_step", lambda folder: (3, folder))
    shrunk, point = runs_of_a_proof.Shrunk("one", (), 4, tmp_path, 60.0), Point("worker", Stop("rollout", 2, 0))
    if ends == 3:
        assert runs_of_a_proof.train_killed(shrunk, "killed", point, None) == 3
        assert (resumed, killed) == ([False, True], [("worker", 7)])
    else:
        with pytest.raises(runs_of_a_proof.ProofError, match=ends):
            runs_of_a_proof.train_killed(shrunk, "killed", point, None)


@pytest.mark.parametrize(
    ("place", "step", "number", "rank", "held"),
    [
        ("ref", 2, 1, "1", True),
        ("ref", 3, 1, "1", False),
        ("update", 2, 1, "1", False),
        ("ref", 2, 1, "0", False),
        ("ref", 2, 2, "1", False),
    ],
)
def test_a_process_is_held_at_its_place_and_at_no_other(tmp_path, monkeypatch, place, step, number, rank, held):
    Stop("ref", 2, 1).write(tmp_path)
    waited = []
    monkeypatch.setattr(stops.time, "sleep", waited.append)
    monkeypatch.setattr(settings, "_current", replace(settings.current(), measure=MeasureSettings(output_dir=tmp_path)))
    monkeypatch.setenv("RANK", rank)
    if held:
        with pytest.raises(SystemExit, match="was not killed"):
            reach(place, step, number)
        assert json.loads((tmp_path / stops.REACHED_NAME).read_text()) == {"pid": os.getpid()}
    else:
        reach(place, step, number)
        assert not (tmp_path / stops.REACHED_NAME).exists()
    assert bool(waited) is held


def test_the_places_of_a_worker_and_of_the_driver_come_in_their_order(tmp_path, monkeypatch):
    """A worker runs two steps and saves the second, and the driver renames twice."""
    seen = []
    places = [(stops.durable, "_write_all"), (stops.durable, "sync_folder"), (stops.saving, "write_file")]
    for module, name in (*places, (stops.Signs, "phase")):
        monkeypatch.setattr(module, name, vars(module)[name])
    monkeypatch.setattr(stops.trainer, "publish_step", lambda root, step: seen.append("published"))
    monkeypatch.setattr(stops, "reach", lambda place, step, number=1: seen.append((place, step, number)))
    monkeypatch.setattr(stops, "_entered", Counter())
    monkeypatch.setattr(stops, "_written", Counter())
    stops.install()
    signs = stops.Signs()
    for _ in range(2):
        for phase in ("rollout", "update"):
            with signs.phase(phase):
                pass
    file = tmp_path / "global_step_2.partial" / "actor" / "rank"
    with signs.phase("checkpoint"):
        pass
    with signs.phase("rollout"):  # the third step's rollout, while the second step is being saved
        stops.saving.write_file(file, {"a": torch.ones(2)}, {})
        stops.durable.write_durably(tmp_path / "another", [b"a"], 1, lambda _: None)
    stops.trainer.publish_step(tmp_path, 2)
    assert seen == [
        ("rollout", 1, 1), ("update", 1, 1), ("rollout", 2, 1), ("update", 2, 1), ("checkpoint", 1, 1),
        ("rollout", 3, 1), (CHUNK, 2, 1), (CHUNK, 2, 2), (FILE, 2, 1), (BEFORE_RENAME, 2, 1), "published",
        (AFTER_RENAME, 2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config-name", "rehearsal", "--points", "0"], "--points=0 is invalid. Set it to at least 1"),
        (["--config-name", "nothing"], "nothing"),
        (["--config-name", "rehearsal", "trainer.n_gpus_per_node=16"], "error: "),
        (["--config-name", "rehearsal", "trainer.savefreq=1"], "did you mean trainer.save_freq?"),
        (["--config-name", "rehearsal", "data.train_batch_size=128"], "has 231 problems. Set it to at most 115"),
    ],
)
def test_invalid_proof_rejected_before_it_starts(tmp_path, capsys, arguments, sentence):
    try:
        status = prove_resume.main([*arguments, "--output", str(tmp_path)])
    except SystemExit as end:
        status = end.code
    assert status == 2 and sentence in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("given", "rows"), [((), 16), (("data.train_batch_size=32",), 64)])
def test_a_proof_has_two_batches_of_the_jobs_own_size(monkeypatch, tmp_path, given, rows):
    monkeypatch.setattr(prove_resume, "_make_model", lambda command: None)
    options = prove_resume._options(["--config-name", "rehearsal", *given])
    for _ in range(2):  # existing files are kept
        prove_resume._shrunk(options, tmp_path)
        assert read_metadata(tmp_path / "data" / "train.parquet").num_rows == rows
    prove_resume._shrunk(prove_resume._options(["--config-name", "rehearsal", "data.train_batch_size=8"]), tmp_path)
    assert read_metadata(tmp_path / "data" / "train.parquet").num_rows == 16


def test_a_model_that_cannot_be_made_is_an_error(monkeypatch, tmp_path, capsys):
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    make = prove_resume._make_model
    monkeypatch.setattr(prove_resume, "_make_model", lambda command: make(failing))
    assert prove_resume.main(["--config-name", "rehearsal", "--output", str(tmp_path)]) == 2
    assert "returned non-zero exit status 3" in capsys.readouterr().err


def test_a_resumed_run_that_cannot_be_compared_counts_as_different(tmp_path, monkeypatch):
    def twice(*arguments):
        raise ValueError("metrics.jsonl has step 2 twice")

    monkeypatch.setattr(prove_resume, "train_killed", lambda *arguments: 1)
    monkeypatch.setattr(prove_resume, "compare", twice)
    shrunk = runs_of_a_proof.Shrunk("one", (), 4, tmp_path, 60.0)
    row = prove_resume._prove_one(shrunk, tmp_path, draw_points(1, 0, 4, 3, PLACES)[0], None)
    assert row.differing == ("metrics.jsonl has step 2 twice",)


@pytest.mark.exhaustive
def test_four_kills_of_the_rehearsal_are_survived(tmp_path):
    line = [sys.executable, str(ROOT / "scripts" / "prove_resume.py"), "--config-name", "rehearsal", "--points", "4"]
    ended = subprocess.run([*line, "--output", str(tmp_path)], capture_output=True, text=True, timeout=3000)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "4 of 4 resumes equalled the unbroken run, bit for bit" in ended.stdout


@pytest.mark.exhaustive
def test_a_kill_in_the_second_of_three_waves_is_survived(tmp_path):
    """With DAPO on FSDP, a step of 12 prompts takes at least three generation batches of 4; unfit prompts add more."""
    sizes = ("data.train_batch_size=12", "+data.gen_batch_size=4")
    job = ["--config-name", "qwen2_5_1_5b_math_one_card", "+recipe=dapo", *sizes, "--output", str(tmp_path)]
    shrunk = prove_resume._shrunk(prove_resume._options(job), tmp_path)
    with SignalFlag() as signals:
        unbroken = runs_of_a_proof.train_unbroken(shrunk, signals)
        gen_batches = [int(metrics["sampling/gen_batches"]) for _, metrics in sorted(metrics_of(unbroken).items())]
        assert len(gen_batches) == runs_of_a_proof.STEPS and min(gen_batches) >= 3
        # A worker counts its rollouts; this is the second one of step 2.
        point = Point("worker", Stop("rollout", gen_batches[0] + 2, 0))
        assert runs_of_a_proof.train_killed(shrunk, "killed", point, signals) == 1
    result = compare(unbroken, tmp_path / "killed", runs_of_a_proof.STEPS)
    assert result.differing == () and result.steps == runs_of_a_proof.STEPS and result.metrics > 50
    assert digests_of(unbroken, 3) != digests_of(unbroken, 2)
