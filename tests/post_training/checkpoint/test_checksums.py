"""SHA-256 lists as written by sha256sum, and numbers on the weight tools' command lines."""

import argparse
import hashlib
import subprocess

import pytest

from post_training.checkpoint.checksums import read_checksums
from post_training.checkpoint.command_line import add_workers_option
from post_training.checkpoint.files import CheckpointError

DIGEST = hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("option", ["--text", "--binary"])
def test_what_sha256sum_prints_is_read(tmp_path, option):
    names = ["model-00001-of-00002.safetensors", "a name of words"]
    for name in names:
        (tmp_path / name).write_text(name)
    printed = subprocess.run(["sha256sum", option, *names], cwd=tmp_path, capture_output=True, text=True, check=True)
    (tmp_path / "list").write_text(printed.stdout)
    expected = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert read_checksums(tmp_path / "list") == expected


@pytest.mark.parametrize("line", [f"{DIGEST[:-1]}  model.safetensors", DIGEST, f"{DIGEST}  ", "model.safetensors", ""])
def test_a_line_without_a_whole_digest_and_a_name_rejected(tmp_path, line):
    file = tmp_path / "list"
    file.write_text(f"{DIGEST}  config.json\n{line}\n")
    with pytest.raises(CheckpointError, match="is not a line of sha256sum"):
        read_checksums(file)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_processes_is_one_or_more(text, capsys):
    parser = argparse.ArgumentParser()
    add_workers_option(parser)
    assert parser.parse_args(["--workers", "1"]).workers == 1
    with pytest.raises(SystemExit):
        parser.parse_args([f"--workers={text}"])
    assert f"{text!r} is invalid. Set it to a whole number from 1" in capsys.readouterr().err
