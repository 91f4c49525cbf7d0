"""Cut a shard of the vocabulary into chunks whose logits fit into a given memory."""

from __future__ import annotations

from collections.abc import Iterator

# Float32, the type in which log-probs and entropy are computed.
_LOGIT_BYTES = 4
# Matrix units work on tiles, which a narrower chunk would waste; one of this width takes comparatively little memory.
_NARROWEST = 128


def chunk_width(tokens: int, vocabulary: int, chunk_bytes: int) -> int:
    """Return the columns of a chunk: a multiple of 128, at least 128, and at most the whole shard.

    Args:
        tokens: rows of the logits.
        vocabulary: columns of this rank's shard.
        chunk_bytes: most bytes of float32 logits of one chunk, where 128 columns fit.
    """
    fitting = chunk_bytes // (_LOGIT_BYTES * max(tokens, 1))
    return min(vocabulary, max(fitting // _NARROWEST * _NARROWEST, _NARROWEST))


def chunks(tokens: int, vocabulary: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first column of each chunk and the one after its last; the last chunk may be narrower."""
    width = chunk_width(tokens, vocabulary, chunk_bytes)
    for first in range(0, vocabulary, width):
        yield first, min(first + width, vocabulary)


def rows_at_once(tokens: int, row_bytes: int, chunk_bytes: int) -> int:
    """Return how many rows of `row_bytes` fit into the memory of a chunk, at least one."""
    return min(max(chunk_bytes // row_bytes, 1), max(tokens, 1))
