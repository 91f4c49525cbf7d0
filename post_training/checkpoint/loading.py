"""Reading a HuggingFace folder, BF16 or FP8, straight into a rank: only the boxes of its layout; nothing is written.

What a rank holds in host memory beyond its own tensors is the description of the files and one staging buffer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from post_training.checkpoint.huggingface import (
    CONFIG_NAME,
    HuggingfaceFolder,
    check_tensors,
    open_huggingface,
    read_json,
)
from post_training.checkpoint.source import Source, volume
from post_training.layouts.layout import PADDING, Box, Piece
from post_training.models.families import table_for

STAGING_BYTES = 64 << 20
"""Bytes on their way to a device, or to a tensor of another type, at a time."""


def load_from_huggingface(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    pieces: Iterable[Piece],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: tuple[str, ...] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Fill the local `tensors` of one rank from a HuggingFace folder and return the number of weights that were read.

    tensors: the rank's live tensors by local name; they are written in place, converted to their own dtype. FP8 weights
        are dequantised to bfloat16 first, as `fp8.dequantise` says.
    pieces: the rank's layout; padding is set to zero.
    shapes: name and shape of every tensor that the checkpoint must have.
    ignored: prefixes of tensors that the checkpoint may have beyond those.
    progress: called with the number of bytes after each read.
    Raises CheckpointError for a damaged folder, and for a missing, unexpected or misshapen tensor.
    """
    folder = open_huggingface(path)
    check_tensors(folder, shapes, ignored)
    pieces = list(pieces)
    stored = [piece for piece in pieces if piece.canonical != PADDING]
    source = folder.source({piece.canonical for piece in stored})
    with torch.no_grad():
        for piece in pieces:
            if piece.canonical == PADDING:
                piece.locate(tensors).zero_()
        for piece in sorted(stored, key=lambda piece: _position(folder, piece)):
            fill(source, piece, piece.locate(tensors), progress)
    return sum(volume(piece.box) for piece in stored)


def ignored_prefixes(path: str | Path) -> tuple[str, ...]:
    """Prefixes of tensors that a folder's own config.json speaks of and no layout uses.

    The configuration that a run is given may leave the layers for multi-token prediction out.
    Raises CheckpointError without config.json, ValueError for a model without a layout table.
    """
    return table_for(read_json(Path(path) / CONFIG_NAME)).ignored_in_files


def _position(folder: HuggingfaceFolder, piece: Piece) -> tuple[Path, int]:
    """Where a piece's tensor lies: files are read from their beginning to their end."""
    tensor = folder.tensors[piece.canonical]
    return tensor.file, tensor.offset


def fill(source: Source, piece: Piece, target: torch.Tensor, progress: Callable[[int], None] = lambda _: None) -> None:
    """Fill `target`, the live memory of a piece on any device, converted to its own type.

    progress: called with the number of bytes after each read.
    """
    dtype = source.dtype(piece.canonical)
    if target.device.type == "cpu" and target.dtype == dtype:
        source.read_into(piece.canonical, piece.box, target)
        progress(target.nbytes)
        return
    for part, rows in _slabs(piece.box, dtype.itemsize):
        staging = torch.empty([stop - start for start, stop in part], dtype=dtype)
        source.read_into(piece.canonical, part, staging)
        target[rows].copy_(staging)
        progress(staging.nbytes)


def _slabs(box: Box, itemsize: int) -> Iterator[tuple[Box, slice]]:
    """Parts of a box of at most STAGING_BYTES (or one row), each with its rows relative to the box."""
    first, last = box[0]
    height = max(STAGING_BYTES * (last - first) // max(volume(box) * itemsize, 1), 1)
    for top in range(first, last, height):
        bottom = min(top + height, last)
        yield ((top, bottom), *box[1:]), slice(top - first, bottom - first)
