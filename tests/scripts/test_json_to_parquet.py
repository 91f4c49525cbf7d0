"""scripts/json_to_parquet.py as a user types it, by its path in the published recipe."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE_PATH = "verl_patches/scripts/json_to_parquet.py"


def convert(*arguments, path=RECIPE_PATH):
    command = [sys.executable, path, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "deepscaler.json"
    path.write_text(json.dumps([{"problem": f"{n}+1", "answer": str(n + 1), "solution": ""} for n in range(20)]))
    return path


def read(folder, name):
    return pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()


def test_the_recipes_command(problems, tmp_path):
    done = convert("--output_dir", tmp_path / "out", "--json_path", problems)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{tmp_path}/out/train.parquet: 18 rows",
        f"{tmp_path}/out/test.parquet: 2 rows",
    ]
    train, test = read(tmp_path / "out", "train"), read(tmp_path / "out", "test")
    assert {row["reward_model"]["ground_truth"] for row in train + test} == {str(n) for n in range(1, 21)}
    assert train[0]["data_source"] == "deepscaler"
    assert [row["extra_info"]["index"] for row in train] == list(range(18))
    questions = [row["extra_info"]["question"] for row in train]
    assert questions != sorted(questions, key=lambda question: int(question.partition("+")[0]))


def test_seed_decides_the_files_byte_by_byte(problems, tmp_path):
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert convert("--output_dir", tmp_path / name, "--json_path", problems, "--seed", seed).returncode == 0
        contents.append([(tmp_path / name / f"{part}.parquet").read_bytes() for part in ("train", "test")])
    assert contents[0] == contents[1] != contents[2]


def test_dropped_records_are_reported(tmp_path):
    rows = [("1+1", "2"), ("2+2", ""), ("1+1", "2"), ("1+1", "3"), ("5+5", "10"), ("6+6", "12")]
    path, test = tmp_path / "some.json", tmp_path / "test.json"
    path.write_text(json.dumps([{"problem": problem, "answer": answer} for problem, answer in rows]))
    test.write_text(json.dumps([{"problem": "5+5", "answer": "10"}]))
    done = convert("--output_dir", tmp_path / "out", "--json_path", path, "--test_json_path", test)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f'{path}: dropped 1 without an answer (first: record 2: the column "answer" is empty)',
        f"{path}: dropped 2 whose question occurs before, 1 of them with another answer (first: record 3 repeats "
        "record 1)",
        f"{path}: dropped 1 that are also test problems",
        f"{tmp_path}/out/train.parquet: 2 rows",
        f"{tmp_path}/out/test.parquet: 1 rows",
    ]
    done = convert("--output_dir", tmp_path / "out", "--json_path", test, "--test_json_path", path)
    assert done.returncode == 2 and "has only test problems" in done.stderr


def official_split(folder):
    """Write the two files of a downloaded data set, under the names that the conversion writes too."""
    folder.mkdir()
    for name, number in (("train", 30), ("test", 6)):
        rows = {
            "question": [f"{name}: {n}+1" for n in range(number)],
            "answer": [f"#### {n + 1}" for n in range(number)],
        }
        pyarrow.parquet.write_table(pyarrow.table(rows), folder / f"{name}.parquet")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("output", ["same", "relative", "linked folder", "linked file"])
@pytest.mark.parametrize("option", ["--json_path", "--test_json_path"])
def test_output_over_an_input_rejected(problems, tmp_path, output, option):
    data = official_split(tmp_path / "gsm8k")
    before = contents(data)
    folder = {"same": data, "relative": data / ".." / "gsm8k"}.get(output, tmp_path / "link")
    if output == "linked folder":
        folder.symlink_to(data)
    elif output == "linked file":
        folder.mkdir()
        (folder / "train.parquet").symlink_to(data / "train.parquet")
    inputs = {"--json_path": problems} | {option: data / "train.parquet"}
    done = convert("--output_dir", folder, *(text for pair in inputs.items() for text in pair))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"error: --output_dir={folder} is invalid: {folder}/train.parquet is the file of {option}. Set it to another "
        "folder.\n"
    )
    assert contents(data) == before


@pytest.mark.parametrize("other", ["columns", "text", "folder"])
def test_output_over_another_file_rejected(problems, tmp_path, other):
    data = official_split(tmp_path / "gsm8k")
    (data / "train.parquet").unlink()
    if other != "columns":
        (data / "test.parquet").unlink()
    if other == "text":
        (data / "test.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    elif other == "folder":
        (data / "test.parquet").mkdir()
    done = convert("--output_dir", data, "--json_path", problems)
    assert done.returncode == 2 and "test.parquet exists and is not a file that this command writes" in done.stderr
    assert done.stderr.count("\n") == 1 and [path.name for path in data.iterdir()] == ["test.parquet"]


def test_earlier_output_is_replaced(problems, tmp_path):
    for count in (4, 5):
        done = convert("--output_dir", tmp_path, "--json_path", problems, "--test_size", count / 20)
        assert done.returncode == 0, done.stderr
        assert len(read(tmp_path, "test")) == count


def test_nan_answer_is_left_out(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(
        '[{"problem": "1+1", "answer": 2}, {"problem": "0/0", "answer": NaN}, {"problem": "2+2", "answer": 4}]'
    )
    done = convert("--output_dir", tmp_path / "out", "--json_path", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        f'{path}: dropped 1 without an answer (first: record 2: the column "answer" is NaN)'
    )


def test_options(problems, tmp_path):
    tests = tmp_path / "tests.json"
    tests.write_text(problems.read_text().replace("+1", "+9"))
    done = convert("--output_dir", tmp_path / "out", "--json_path", problems, "--test_json_path", tests,
                   "--data_source", "own", "--instruction", "Answer:", path="scripts/json_to_parquet.py")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "out", "train")) == len(read(tmp_path / "out", "test")) == 20
    row = read(tmp_path / "out", "test")[3]
    assert row["prompt"][0]["content"] == "3+9 Answer:" and row["data_source"] == "own"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("[]", "has no problem"),
        ('[{"x": 1}]', "has the columns x"),
        ("{", "line 1 is not"),
        ("[" * 100_000, "nested too deeply"),
        ('{"problem": "1", "answer": ' + "9" * 5000 + "}", "too long"),
        (r'{"problem": "\ud800", "answer": "1"}', "lone surrogate"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(tmp_path, content, message):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    done = convert("--output_dir", tmp_path / "out", "--json_path", path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: The data file {path}" if content is None else f"error: {path}")
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_that_are_no_text_rejected(problems, tmp_path):
    done = convert("--output_dir", tmp_path / "out", "--json_path", problems, "--instruction", "\udcff")
    assert done.returncode == 2 and done.stderr == "error: --instruction is not UTF-8 text. Set it in UTF-8.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", ["1.5", "1.0", "0.0"])
def test_bad_split_rejected(problems, tmp_path, share):
    done = convert("--output_dir", tmp_path / "out", "--json_path", problems, "--test_size", share)
    assert done.returncode == 2 and f"--test_size={share} is invalid" in done.stderr
