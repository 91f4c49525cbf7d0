"""The command lines of all benchmarks: one form of --json, and one sentence for a bad value before anything runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.options import write_results

ROOT = Path(__file__).parents[2]
PROGRAMS = ("decode_schedule", "emulator_overhead", "prelude_import", "reshard", "step_memory", "weights")


def run(program: str, *arguments: object) -> subprocess.CompletedProcess:
    line = [sys.executable, ROOT / "benchmarks" / f"{program}.py", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("program", PROGRAMS)
def test_json_names_a_file_and_one_that_cannot_be_written_rejected(program, tmp_path):
    rejected = run(program, "--json", tmp_path / "absent" / "results.json")
    assert rejected.returncode == 2 and rejected.stderr.count("\n") == 1
    assert "results.json is no file that can be written" in rejected.stderr


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("emulator_overhead", ("--pairs", "0")),
        ("decode_schedule", ("--ranks", "1")),
        ("decode_schedule", ("--lengths", "/absent")),
        ("decode_schedule", ("--drift", "-1")),
        ("reshard", ("--repeats", "0")),
        ("reshard", ("--bucket", "many")),
        ("step_memory", ("--cycles", "x")),
        ("weights", ()),
        ("weights", ("--work", ROOT)),
        ("weights", ("--gigabytes", "nan", "--work", "/absent")),
    ],
)
def test_a_bad_value_is_one_sentence(program, arguments):
    rejected = run(program, *arguments)
    assert rejected.returncode == 2 and rejected.stderr.startswith("error: ") and rejected.stderr.count("\n") == 1


def test_results_are_written_as_json(tmp_path, capsys):
    write_results(None, {"a": 1})
    assert not capsys.readouterr().err
    write_results(tmp_path / "results.json", {"a": 1})
    assert json.loads((tmp_path / "results.json").read_text()) == {"a": 1}
