"""Chunk widths for a shard of the vocabulary."""

import pytest

from post_training.layouts.vocabulary_chunks import chunk_width, chunks, rows_at_once

MIB = 2**20


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk_bytes", "width"),
    [
        (4096, 32_320, 32 * MIB, 2048),
        (4096, 32_320, 33 * MIB, 2048),
        (1024, 32_320, 32 * MIB, 8192),
        (64, 32_320, 32 * MIB, 32_320),
        (131_072, 32_320, 32 * MIB, 128),
        (1, 96, 1, 96),
        (0, 32_320, 32 * MIB, 32_320),
    ],
)
def test_width_fits_the_memory(tokens, vocabulary, chunk_bytes, width):
    """The width is a multiple of 128 that fits, 128 if none does, or the whole shard if that is smaller."""
    assert chunk_width(tokens, vocabulary, chunk_bytes) == width


def test_chunks_cover_the_shard_once():
    found = list(chunks(4096, 32_320, 32 * MIB))
    assert found[0] == (0, 2048) and found[-1] == (30_720, 32_320) and len(found) == 16
    assert all(end == first for (_, end), (first, _) in zip(found, found[1:], strict=False))


@pytest.mark.parametrize(
    ("tokens", "row_bytes", "chunk_bytes", "rows"),
    [(4096, 14_336, 32 * MIB, 2340), (10, 14_336, 32 * MIB, 10), (10, 14_336, 1, 1), (0, 4, 8, 1)],
)
def test_rows_at_once_fit_the_memory(tokens, row_bytes, chunk_bytes, rows):
    assert rows_at_once(tokens, row_bytes, chunk_bytes) == rows
