"""scripts/check_data.py as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from post_training.data import Problem, to_row
from rehearsal.tiny_model.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ROWS = [to_row(Problem("1+1 " * n, str(n)), n, "train", "own", "") for n in range(1, 5)]


def check(*arguments):
    command = [sys.executable, "scripts/check_data.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)


@pytest.fixture
def sound(tmp_path):
    path = tmp_path / "sound.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return folder


def test_statuses_and_lines(sound, tmp_path):
    done = check(sound)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{sound}: 4 rows, kinds of errors: 0; verl can train on it\n"
    raw = tmp_path / "raw.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["x"], "answer": ["#### 1"]}), raw)
    done = check(raw)
    assert done.returncode == 1 and done.stdout.startswith("error: column data_source: it is missing")
    assert "json_to_parquet.py" in done.stdout
    done = check(tmp_path / "absent.parquet")
    assert done.returncode == 2 and done.stderr.startswith("error: The data file") and done.stdout == ""


@pytest.mark.parametrize("limit", ["-5", "0"])
def test_limit_that_is_none_rejected(sound, limit):
    done = check(sound, f"--max_prompt_length={limit}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: --max_prompt_length={limit} is invalid. Set it to at least 1.\n"


@pytest.mark.slow
def test_lengths_are_those_that_verl_counts(sound, tokenizer):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer)
    lengths = [len(reference.apply_chat_template(row["prompt"], add_generation_prompt=True)) for row in ROWS]
    limit = sorted(lengths)[2]
    done = check(sound, "--tokenizer", tokenizer, "--max_prompt_length", limit, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["usable"]
    assert found["tokens"] == {
        "shortest": min(lengths), "mean": sum(lengths) / 4, "longest": max(lengths), "overlong": 1,
    }  # fmt: skip
    (finding,) = found["findings"]
    assert finding["rows"] == [lengths.index(max(lengths))] and str(max(lengths)) in finding["remedy"]


def test_folder_without_tokenizer_rejected(sound, tmp_path):
    for folder, words in ((tmp_path, "is invalid: no tokenizer"), (tmp_path / "absent", "is invalid: not a folder")):
        done = check(sound, "--tokenizer", folder)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
