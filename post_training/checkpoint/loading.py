"""Reads a HuggingFace folder, BF16 or FP8, straight into a rank: only the slices of its layout; nothing is written.

Beyond its own tensors a rank only holds the files' headers and one staging buffer in host memory.
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
from post_training.layouts.layout import PADDING, Shard, Slice
from post_training.models.families import table_for

STAGING_BYTES = 64 << 20
"""Size of the staging buffer for copies to a device, or to a tensor of another type."""


def load_from_huggingface(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    shards: Iterable[Shard],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: tuple[str, ...] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Fill the local `tensors` of one rank from a HuggingFace folder and return the number of elements that were read.

    Args:
        path: the folder.
        tensors: the rank's live tensors by local name; they are written in place, converted to their own dtype. FP8
            weights are dequantised to bfloat16 first, see `fp8.dequantise`.
        shards: the rank's layout; padding is set to zero.
        shapes: name and shape of every tensor that the checkpoint must have.
        ignored: prefixes of tensors that the checkpoint may have beyond those.
        progress: called with the number of bytes after each read.

    Raises:
        CheckpointError: the folder is damaged, or a tensor is missing, unexpected or of another shape.
    """
    folder = open_huggingface(path)
    check_tensors(folder, shapes, ignored)
    shards = list(shards)
    stored = [shard for shard in shards if shard.hf_name != PADDING]
    source = folder.source({shard.hf_name for shard in stored})
    with torch.no_grad():
        for shard in shards:
            if shard.hf_name == PADDING:
                shard.locate(tensors).zero_()
        for shard in sorted(stored, key=lambda shard: _position(folder, shard)):
            fill(source, shard, shard.locate(tensors), progress)
    return sum(volume(shard.bounds) for shard in stored)


def ignored_prefixes(path: str | Path) -> tuple[str, ...]:
    """Return prefixes of tensors that a folder's own config.json describes and no layout uses.

    A run's configuration may leave out the layers for multi-token prediction.

    Raises:
        CheckpointError: there is no config.json.
        ValueError: there is no sharding spec for the model.
    """
    return table_for(read_json(Path(path) / CONFIG_NAME)).ignored_in_files


def _position(folder: HuggingfaceFolder, shard: Shard) -> tuple[Path, int]:
    """Return file and offset of a shard's tensor, the sort key with which files are read from start to end."""
    tensor = folder.tensors[shard.hf_name]
    return tensor.file, tensor.offset


def fill(source: Source, shard: Shard, target: torch.Tensor, progress: Callable[[int], None] = lambda _: None) -> None:
    """Fill `target`, the live memory of a shard on any device, and convert to its type.

    `progress` is called with the number of bytes after each read.
    """
    dtype = source.dtype(shard.hf_name)
    if target.device.type == "cpu" and target.dtype == dtype:
        source.read_into(shard.hf_name, shard.bounds, target)
        progress(target.nbytes)
        return
    for part, rows in _slabs(shard.bounds, dtype.itemsize):
        staging = torch.empty([stop - start for start, stop in part], dtype=dtype)
        source.read_into(shard.hf_name, part, staging)
        target[rows].copy_(staging)
        progress(staging.nbytes)


def _slabs(bounds: Slice, itemsize: int) -> Iterator[tuple[Slice, slice]]:
    """Yield parts of a slice of at most STAGING_BYTES (or one row), each with its rows relative to the slice."""
    first, last = bounds[0]
    height = max(STAGING_BYTES * (last - first) // max(volume(bounds) * itemsize, 1), 1)
    for top in range(first, last, height):
        bottom = min(top + height, last)
        yield ((top, bottom), *bounds[1:]), slice(top - first, bottom - first)
