"""The two small tools: what they print, what they write, and how they reject."""

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
    assert capsys.readouterr().err == f"The data file {tmp_path / 'none.jsonl'} does not exist: check the path.\n"
    assert not (tmp_path / "tiny").exists()
