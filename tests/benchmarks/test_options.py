"""Command lines of all benchmarks: the same --json, and one sentence for a bad value before anything runs."""

import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.options import write_results

ROOT = Path(__file__).parents[2]
PROGRAMS = ("decode_schedule", "emulator_overhead", "prelude_import", "reshard", "step_memory", "weights")


@pytest.fixture
def rejected(capsys):
    """Return a function that starts a program, expects exit status 2, and returns its error output.

    The program runs in this process, which has already imported PyTorch.
    """

    def start(program: str, *arguments: object) -> str:
        path = ROOT / "benchmarks" / f"{program}.py"
        words, places = [str(path), *map(str, arguments)], list(sys.path)
        with mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", places), mock.patch.dict(os.environ):
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(path), run_name="__main__")
        assert ended.value.code == 2
        return capsys.readouterr().err

    return start


@pytest.mark.parametrize("program", PROGRAMS)
def test_json_names_a_file_and_one_that_cannot_be_written_rejected(rejected, program, tmp_path):
    error = rejected(program, "--json", tmp_path / "absent" / "results.json")
    assert error.count("\n") == 1 and "results.json is not a writable file" in error


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
def test_a_bad_value_is_one_sentence(rejected, program, arguments):
    error = rejected(program, *arguments)
    assert error.startswith("error: ") and error.count("\n") == 1


def test_results_are_written_as_json(tmp_path, capsys):
    write_results(None, {"a": 1})
    assert not capsys.readouterr().err
    write_results(tmp_path / "results.json", {"a": 1})
    assert json.loads((tmp_path / "results.json").read_text()) == {"a": 1}
