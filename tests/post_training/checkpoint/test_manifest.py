"""Manifests are read back as written, and their digests are compared with those of other files."""

from pathlib import Path

import pytest

from post_training.checkpoint.durable import Written
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import Manifest, check_digests

FILE = Written(5, "a" * 64)


@pytest.mark.parametrize("found", [Written(6, "a" * 64), Written(5, "b" * 64), Written(6, "b" * 64)])
def test_file_of_another_digest_or_size_has_changed(found):
    expected = {"config.json": Written(1, "c" * 64), "model.safetensors": FILE, "of_another_rank": FILE}
    check_digests(Path("folder"), expected, {"model.safetensors": FILE, "new": FILE}, "manifest.json")
    with pytest.raises(CheckpointError) as raised:
        check_digests(Path("folder"), expected, {"model.safetensors": found, "new": FILE}, "manifest.json")
    assert str(raised.value) == (
        f"folder/model.safetensors: has SHA-256 {found.sha256} ({found.bytes} bytes), but manifest.json has {'a' * 64} "
        "(5 bytes): the file has changed"
    )


def test_manifest_is_read_back_as_it_was_written(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(5))
    manifest = Manifest({"tool": "cast", "ranks": 2}, {"a": Written(1, "d" * 64)}, {"model.safetensors": FILE}, True)
    assert Manifest.read(tmp_path) is None
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"arguments": {}, "sources": {}, "files": {}, "complete": true}',
        '{"format": 2, "arguments": {}, "sources": {}, "files": {}, "complete": true}',
        '{"format": 1, "arguments": {}, "sources": {}, "complete": true}',
        '{"format": 1, "arguments": {}, "sources": {}, "files": {"a": {"bytes": 1}}, "complete": true}',
        '{"format": 1, "arguments": {}, "sources": {}, "files": {}, "complete": true, "more": 1}',
    ],
)
def test_manifest_of_another_form_is_rejected(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest.json: not a manifest of these tools"):
        Manifest.read(tmp_path)
