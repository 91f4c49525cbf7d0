"""For a damaged file of a run, report.py prints one sentence or shows it; it never hangs or prints a traceback."""

import copy
import json
import os
from pathlib import Path
from random import Random

import pytest

from post_training.report import ReportError
from post_training.report.run_page import render_page
from scripts import report
from tests.post_training.report.test_run_page import end, write_run

FILES = ("metrics.jsonl", "events.jsonl", "faults.jsonl", "alerts.jsonl", "samples.first.json", "memory/9.json",
         "meters/1.json", "overlay.json", "summary.json", "config.yaml")  # fmt: skip
METERS = {
    "collectives": {"all_to_all": {"4": {"count": 1, "bytes": 2}}}, "copies": {"h2d": {"count": 1, "bytes": 2}},
    "operators": {"add": {"calls": 3}}, "memory": {"0": {"peak_allocated": 5}},
    "phases": {"update": {"peak_bytes": {"0": 4}}},
}  # fmt: skip
WRONG = (None, True, -1, 1e300, "text", [], {}, [[1]], {"a": {"b": 1}})


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "run")
    end(folder, "failed", "it broke")
    (folder / "faults.jsonl").write_text('{"time": 1.0, "kind": "x", "step": 2, "message": "skipped"}\n')
    (folder / "alerts.jsonl").write_text('{"time": 1, "step": 2, "alert": "kl", "message": "kl at step 2"}\n')
    (folder / "meters").mkdir()
    (folder / "meters" / "1.json").write_text(json.dumps(METERS))
    (folder / "summary.json").write_text(json.dumps({"failure": None}))
    (folder / "overlay.json").write_text(json.dumps({"applied": ["p"], "pending": [], "effective": {"p": 1}}))
    return folder


def said(folder: Path) -> str:
    """Return report.py's error for the folder, or "" if it rendered the page."""
    try:
        return render_page(folder) and ""
    except ReportError as error:
        return str(error)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\n", b"[" * 20_000 + b"\n", b'{"a": 1, "a": 2}\n', b"{\n", b"1" * 6000 + b"\n"]
)
def test_damaged_bytes_named(run, name, content):
    (run / name).write_bytes(content)
    sentence = said(run)
    # YAML reads a long number as a scalar, which is not a configuration.
    assert str(run / name) in sentence and "\n" not in sentence and len(sentence) < 600


@pytest.mark.parametrize("name", FILES)
def test_pipe_in_place_of_file_rejected(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert "is a pipe" in said(run)


def test_event_without_time_named(run, capsys):
    (run / "events.jsonl").write_text('{"time": 1, "event": "ray_ready"}\n{"event": "ended"}\n')
    assert said(run) == f"{run}/events.jsonl, line 2: time=None is invalid: a float is needed. Correct the line."
    assert report.main([str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run}/events.jsonl, line 2")


def test_any_damage_rejected_or_shown(run):
    """Drop or replace every value of every file in turn."""
    draw = Random(0)
    for name in [each for each in FILES if not each.endswith(".yaml")]:
        file, text = run / name, (run / name).read_text()
        lines = [json.loads(line) for line in text.splitlines() if line]
        for number, line in enumerate(lines):
            for path in _paths(line):
                for wrong in ("dropped", *draw.sample(WRONG, 3)):
                    damaged = copy.deepcopy(line)
                    _put(damaged, path, wrong)
                    kept = [json.dumps(each) for each in [*lines[:number], damaged, *lines[number + 1 :]]]
                    file.write_text("\n".join(kept) + "\n")
                    sentence = said(run)
                    assert "\n" not in sentence and (not sentence or str(run) in sentence)
        file.write_text(text)


def _paths(node, path=()):
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield (*path, key)
            yield from _paths(node[key], (*path, key))


def _put(node, path, value):
    *parents, last = path
    for key in parents:
        node = node[key]
    if value == "dropped":
        del node[last]
    else:
        node[last] = value
