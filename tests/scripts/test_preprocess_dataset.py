"""examples/data_preprocess: verl's commands for GSM8K and MATH write the same rows as verl's own scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from post_training.data import DataError
from post_training.data.hub_files import split_file
from tests.scripts.cluster_files import ROOT

FOLDER = ROOT / "examples" / "data_preprocess"
GSM8K = [
    {"question": "Ann has 3 boxes of 1,200 pins. How many?", "answer": "3*1200=<<3*1200=3600>>3600\n#### 3,600"},
    {"question": "Tom walks 2 km a day. How far in a week?", "answer": "2*7=14\n#### 14"},
]
MATH = [
    {
        "problem": "What is $\\frac12+\\frac12$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "It is $\\boxed{1}$.",
    },
    {"problem": "Factor $x^2-1$.", "level": "Level 2", "type": "Algebra", "solution": "So $\\boxed{(x-1)(x+1)}$."},
]
# The sources, and the ends of the prompts, as verl's own scripts of these names write them.
KINDS = {
    "gsm8k": (
        GSM8K, "openai/gsm8k", "question", ["3600", "14"],
        'Let\'s think step by step and output the final answer after "####".',
    ),
    "math_dataset": (
        MATH, "DigitalLearningGmbH/MATH-lighteval", "problem", ["1", "(x-1)(x+1)"],
        "Let's think step by step and output the final answer within \\boxed{}.",
    ),
}  # fmt: skip


def downloaded(folder: Path, records: list[dict[str, str]], place: str) -> Path:
    """Write a data set as a hub client leaves it: a file per split; the test split varies the first record."""
    (folder / place).mkdir(parents=True)
    for split, rows in (("train", records), ("test", [{**records[0], **{next(iter(records[0])): "Another?"}}])):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / place / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text("train and test")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "train.json").write_text("{}")
    return folder


def preprocess(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / f"{name}.py", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", KINDS)
def test_local_files_become_verls_rows(name, tmp_path):
    records, source, column, truths, instruction = KINDS[name]
    hub = downloaded(tmp_path / "hub", records, "main" if name == "gsm8k" else "data")
    ended = preprocess(name, "--local_dir", tmp_path / "out", "--local_dataset_path", hub)
    assert ended.returncode == 0, ended.stderr
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": f"{record[column]} {instruction}"}] for record in records
    ]
    assert [row["reward_model"] for row in rows] == [{"style": "rule", "ground_truth": truth} for truth in truths]
    assert {row["data_source"] for row in rows} == {source}
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert len(pyarrow.parquet.read_table(tmp_path / "out" / "test.parquet")) == 1


@pytest.mark.parametrize("name", KINDS)
def test_verls_rule_judges_the_rows(name, tmp_path):
    """verl's own reward for that source accepts right answers in the form that the prompt asks for."""
    from verl.utils.reward_score import default_compute_score

    records, *_ = KINDS[name]
    hub = downloaded(tmp_path / "hub", records, "main")
    assert preprocess(name, "--local_dir", tmp_path, "--local_dataset_path", hub).returncode == 0
    for row in pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist():
        truth = row["reward_model"]["ground_truth"]
        answer = f"So it is.\n#### {truth}" if name == "gsm8k" else f"So it is $\\boxed{{{truth}}}$."
        assert default_compute_score(row["data_source"], answer, truth) == 1
        assert default_compute_score(row["data_source"], answer.replace(truth, "8"), truth) == 0


def test_data_set_in_the_clients_cache_needs_no_network(tmp_path):
    repository = tmp_path / "hub" / "datasets--openai--gsm8k"
    downloaded(repository / "snapshots" / ("b" * 40), GSM8K, "main")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    ended = preprocess("gsm8k", "--local_dir", tmp_path / "out", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert ended.returncode == 0, ended.stderr
    assert len(pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet")) == 2


@pytest.mark.parametrize("name", KINDS)
def test_absent_data_set_names_the_download_commands(name, tmp_path):
    ended = preprocess(name, "--local_dir", tmp_path / "out", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
    source, folder = KINDS[name][1], KINDS[name][1].partition("/")[2]
    mirror = "gsm8k" if name == "gsm8k" else "MATH-lighteval"
    assert f"modelscope download --dataset AI-ModelScope/{mirror} --local_dir {folder}, or " in ended.stderr
    assert (
        f"hf download --repo-type dataset {source} --local-dir {folder}, and pass --local_dataset_path" in ended.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hdfs_dir", "hdfs://x"], "--hdfs_dir=hdfs://x is not supported. Copy the files"),
        (["--local_dataset_path", "/no/such"], "/no/such is not a folder. Pass the folder"),
    ],
)
def test_option_that_cannot_be_taken_is_one_sentence(arguments, says, tmp_path):
    ended = preprocess("gsm8k", "--local_dir", tmp_path, *arguments)
    assert ended.returncode == 2 and says in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_split_is_found_where_hubs_have_it(tmp_path):
    for place in ("socratic", "main"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "train-00000-of-00001.parquet").write_text("")
    assert split_file(tmp_path, "train").parent.name == "main"
    with pytest.raises(DataError, match="has no file of the split test"):
        split_file(tmp_path, "test")
    (tmp_path / "main" / "train.jsonl").write_text(json.dumps({}))
    with pytest.raises(DataError, match="has several files of the split train"):
        split_file(tmp_path, "train")
