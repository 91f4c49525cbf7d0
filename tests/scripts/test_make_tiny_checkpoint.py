"""The two small tools: their output, their files, and their rejections."""

import json

import pytest

from scripts import make_arithmetic_data, make_tiny_checkpoint


def test_data_then_checkpoint_then_the_kept_checkpoint(tmp_path, capsys):
    assert make_arithmetic_data.main(["--output", str(tmp_path / "data"), "--seed", "4"]) == 0
    assert "231 training and 24 test problems" in capsys.readouterr().out
    checkpoint = ["--output", str(tmp_path / "tiny"), "--data", str(tmp_path / "data" / "train.jsonl")]
    assert make_tiny_checkpoint.main([*checkpoint, "--no-warm-start"]) == 0
    assert capsys.readouterr().out.startswith("wrote the checkpoint")
    assert make_tiny_checkpoint.main([*checkpoint, "--no-warm-start"]) == 0
    assert capsys.readouterr().out.startswith("kept the checkpoint of the same inputs")


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
