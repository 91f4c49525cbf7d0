"""Headers of written files match those of the safetensors library."""

import json
import struct

import pytest
from safetensors import deserialize

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.safetensors_files import header, read_header


@pytest.mark.parametrize("length", range(1, 9))
def test_a_header_ends_at_a_multiple_of_eight_bytes(length):
    """The format's own writer pads to this, and readers map the tensors behind the header into memory."""
    content = header([], {"note": "x" * length})
    (size,) = struct.unpack("<Q", content[:8])
    assert size % 8 == 0 and len(content) == 8 + size
    assert deserialize(content) == []


@pytest.mark.parametrize("length", [95, 1 << 20, 1 << 40])
def test_header_longer_than_its_file_reported_as_cut_off(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(84))
    with pytest.raises(CheckpointError, match="cut off in its header. Download it again"):
        read_header(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
    ],
)
def test_invalid_header_rejected(tmp_path, entry):
    """Try a missing key, an unknown dtype, a size that contradicts the shape, and a shape that is no list."""
    path = tmp_path / "model.safetensors"
    for told, is_rejected in (({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, False), (entry, True)):
        content = json.dumps({"weight": told}).encode()
        path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(8))
        if is_rejected:
            with pytest.raises(
                CheckpointError, match=r"model\.safetensors: its header is damaged .*. Download it again"
            ):
                read_header(path)
        else:
            assert read_header(path)["weight"].shape == (2,)
