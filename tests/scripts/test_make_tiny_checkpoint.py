"""The two small tools: their output, their files, and their rejections."""

import fcntl
import json
import subprocess
import sys

import pytest

from rehearsal.plan import ROOT
from scripts import make_arithmetic_data, make_tiny_checkpoint


def test_data_then_checkpoint_then_the_kept_checkpoint(tmp_path, capsys):
    assert make_arithmetic_data.main(["--output", str(tmp_path / "data"), "--seed", "4"]) == 0
    assert "231 training and 24 test problems" in capsys.readouterr().out
    checkpoint = ["--output", str(tmp_path / "tiny"), "--data", str(tmp_path / "data" / "train.jsonl")]
    assert make_tiny_checkpoint.main([*checkpoint, "--no-warm-start"]) == 0
    assert capsys.readouterr().out.startswith("wrote the checkpoint")
    assert make_tiny_checkpoint.main([*checkpoint, "--no-warm-start"]) == 0
    assert capsys.readouterr().out.startswith("kept the checkpoint of the same inputs")


@pytest.mark.slow
def test_checkpoint_that_another_process_makes_is_waited_for_and_kept(tmp_path):
    """Both begin before there is a checkpoint."""
    output = tmp_path / "tiny"
    command = [sys.executable, "scripts/make_tiny_checkpoint.py", "--no-warm-start", "--output", output]
    lock = tmp_path / ".tiny.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
        for process in processes:
            assert process.stdout.readline() == f"waiting for another process that makes {output}\n"
    said = sorted(process.communicate(timeout=600)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0].startswith("kept the checkpoint") and "wrote the checkpoint" in said[1]
    assert not lock.exists()


def test_missing_data_is_one_sentence_and_a_failure(tmp_path, capsys):
    assert make_tiny_checkpoint.main(["--output", str(tmp_path / "tiny"), "--data", str(tmp_path / "none.jsonl")]) == 1
    assert capsys.readouterr().err == f"The data file {tmp_path / 'none.jsonl'} does not exist. Check the path.\n"
    assert not (tmp_path / "tiny").exists()


def test_changed_keys_are_in_the_configuration(tmp_path):
    options = ["--output", str(tmp_path / "tiny"), "--no-warm-start", "--set", "num_experts_per_tok=4"]
    assert make_tiny_checkpoint.main([*options, "--set", "topk_group=2"]) == 0
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert (config["num_experts_per_tok"], config["topk_group"], config["n_group"]) == (4, 2, 8)


def test_change_without_a_number_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        make_tiny_checkpoint.main(["--output", str(tmp_path / "tiny"), "--set", "topk_group=two"])
    assert "'topk_group=two' is not KEY=N with a whole number N" in capsys.readouterr().err
