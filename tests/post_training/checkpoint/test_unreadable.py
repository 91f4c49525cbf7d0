"""verify_ckpt.py rejects a folder that cannot be a checkpoint, at once and in one sentence."""

import json
import os
import shutil
import struct

import pytest

from scripts import verify_ckpt
from tests.post_training.checkpoint import small_families


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return small_families.write("qwen2", tmp_path_factory.mktemp("pristine") / "hf")


@pytest.fixture
def damaged(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "damaged")


def said(pristine, damaged, capsys):
    assert verify_ckpt.main([str(pristine), str(damaged), "--workers", "1"]) == 2
    sentence = capsys.readouterr().err.strip()
    assert sentence.startswith("error: ") and "\n" not in sentence and len(sentence) < 500
    return sentence


SIZES = (
    ("hidden_size", "8"), ("hidden_size", 8.0), ("hidden_size", [8]), ("hidden_size", None), ("vocab_size", -1),
    ("num_attention_heads", 0), ("num_hidden_layers", 10**9), ("num_key_value_heads", True),
    ("intermediate_size", 10**30),
)  # fmt: skip


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_impossible_size_named(pristine, damaged, capsys, key, value):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {key: value}))
    assert f"{key}" in said(pristine, damaged, capsys)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_rejected(pristine, damaged, capsys, name):
    (file,) = damaged.glob(name)
    file.unlink()
    os.mkfifo(file)
    assert "is a pipe" in said(pristine, damaged, capsys)


ENTRY = b'{"a": {"dtype": "BF16", "shape": %s, "data_offsets": %s}}'
HEADERS = (
    b"[]", b"5", b"[" * 20_000, b'{"a": 1, "a": 2}', b"\xff", b'{"__metadata__": 5, "a": []}',
    ENTRY % (b'["x"]', b"[0, 2]"), ENTRY % (b"[-1]", b"[0, -2]"), ENTRY % (b"[1]", b"[0]"),
)  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_damaged_header_rejected(pristine, damaged, capsys, header):
    (damaged / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "header" in said(pristine, damaged, capsys)


@pytest.mark.parametrize(
    "text", ["[]", "5", "[" * 20_000, '{"a": 1, "a": 2}', "", '{"model_type": 5, "architectures": 5}']
)
def test_damaged_configuration_rejected(pristine, damaged, capsys, text):
    (damaged / "config.json").write_text(text)
    said(pristine, damaged, capsys)
