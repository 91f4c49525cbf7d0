import json

import numpy as np
import torch

from post_training.report.metrics import read_events
from verl_patches.features.measure import run_files
from verl_patches.features.measure.run_files import RunFiles, read_executed, read_faults, read_patches
from verl_patches.features.training_checkpoint.run_records import take_back_steps


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_are_appended_with_plain_numbers(tmp_path):
    files = RunFiles(str(tmp_path / "run"))
    unusual = {"c": float("nan"), "d": float("inf"), "e": np.array([1])}
    files.step(1, {"a": np.float32(0.5), "b": torch.tensor(3), **unusual})
    files.step(2, {"a": 1.0, "f": np.array([1, 2])})
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    assert first["step"] == 1 and first["time"] > 0
    assert first["metrics"] == {"a": 0.5, "b": 3, "c": None, "d": None, "e": 1}
    assert second["metrics"] == {"a": 1.0, "f": "[1 2]"}


def test_executed_patches_are_written_once_and_read_from_all_processes(tmp_path, monkeypatch, own_context):
    files = RunFiles(str(tmp_path))
    files.executed(["b", "a"])
    files.executed(["a", "b"])
    files.executed(["b", "c"])
    assert [entry["executed"] for entry in read_patches(tmp_path)] == [["a", "b"], ["c"]]
    # A process on another node, which may have the same pid.
    own_context.take(run_files._Written)
    monkeypatch.setattr(run_files.socket, "gethostname", lambda: "other")
    files.executed(["a", "d"])
    assert read_executed(tmp_path) == ["a", "b", "c", "d"] and read_executed(tmp_path / "absent") == []


def test_no_two_processes_append_to_one_file_of_patches(tmp_path, monkeypatch, own_context):
    """Appends from two nodes to one NFS file overwrite each other, so each process has its own file."""
    files, written = RunFiles(str(tmp_path)), {}
    for host, process in (("a", 7), ("b", 7), ("a", 8)):
        own_context.take(run_files._Written)
        monkeypatch.setattr(run_files.socket, "gethostname", lambda name=host: name)
        monkeypatch.setattr(run_files.os, "getpid", lambda number=process: number)
        files.executed([f"{host}{process}"])
        written[host, process] = {path.name for path in (tmp_path / "patches").iterdir()}
    assert [len(names) for names in written.values()] == [1, 2, 3]
    assert read_executed(tmp_path) == ["a7", "a8", "b7"]
    assert sorted(entry["process"] for entry in read_patches(tmp_path)) == [7, 7, 8]


def test_events_and_overlay(tmp_path):
    files = RunFiles(str(tmp_path))
    files.note("ray_ready")
    files.note("data_ready")
    assert [entry["event"] for entry in lines(tmp_path / "events.jsonl")] == ["ray_ready", "data_ready"]
    files.overlay({"applied": ["x"]})
    files.overlay({"applied": ["y"]})
    assert json.loads((tmp_path / "overlay.json").read_text()) == {"applied": ["y"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "overlay.json"]


def test_faults_are_read_back_without_a_line_in_writing(tmp_path):
    assert read_faults(tmp_path) == []
    files = RunFiles(str(tmp_path))
    files.fault("reward_error", "the reward function failed once at step 3", 3, errors=["ValueError: no"])
    (first,) = read_faults(tmp_path)
    assert (first["kind"], first["step"], first["errors"]) == ("reward_error", 3, ["ValueError: no"])
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write('{"kind": "half')
    assert read_faults(tmp_path) == [first]


def test_event_after_half_a_line_stands_on_its_own(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "event": "ray_ready"}\n{"time": 2.0, "ev')
    RunFiles(str(tmp_path)).note("data_ready")
    take_back_steps(str(tmp_path), 0)  # called by a resumed run
    assert [event["event"] for event in read_events(tmp_path)] == ["ray_ready", "data_ready"]
    assert (tmp_path / "events.jsonl.damaged").read_text() == '{"time": 2.0, "ev\n'


def test_an_empty_folder_name_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = RunFiles("")
    files.step(1, {})
    files.note("x")
    files.overlay({})
    assert not list(tmp_path.iterdir())
