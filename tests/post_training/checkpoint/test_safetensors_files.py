"""Headers of the files that are written, against the library of their format."""

import struct

import pytest
from safetensors import deserialize

from post_training.checkpoint.safetensors_files import header


@pytest.mark.parametrize("length", range(1, 9))
def test_a_header_ends_at_a_multiple_of_eight_bytes(length):
    """The format's own writer pads so, and readers map tensors into memory behind it."""
    content = header([], {"note": "x" * length})
    (size,) = struct.unpack("<Q", content[:8])
    assert size % 8 == 0 and len(content) == 8 + size
    assert deserialize(content) == []
