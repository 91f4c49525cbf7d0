"""Training state in files: the optimizer's states of every weight, by HF name, in safetensors.

Every rank writes one file with the slices that it owns. An entry has a name like `exp_avg/model.norm.weight[0:64]`:
state, HF tensor and slice. The slices of all files together cover every tensor once, so a checkpoint can be read under
any layout. A slice is stored in the orientation of the HF tensor, independent of its form on the rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch

from post_training.checkpoint.durable import Written, write_durably
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.records import Record
from post_training.checkpoint.regions import Region, StoredTensor
from post_training.checkpoint.safetensors_files import header, read_header, read_metadata
from post_training.checkpoint.source import Fragment, HFTensor, Source
from post_training.checkpoint.step_files import complete_manifest
from post_training.layouts.layout import EXPERT_MARK, PADDING, Shard, Slice, Table, TrainPlacement, as_matrix

MASTER, WEIGHT, MOMENTS = "master", "weight", ("exp_avg", "exp_avg_sq")
"""The float32 weight that the optimizer updates; a weight that no optimizer updates, in its own type; AdamW's averages.
"""

STEPS = "optimizer_steps"
"""Metadata key in each rank's file: the number of updates that its optimizer has made."""

RANDOM = "random/"
"""Prefix of a rank's own entries: states of random number generators."""

_SHARD_BYTES = 8 << 20
_NAME = re.compile(r"(?P<state>\w+)/(?P<hf_name>.+)\[(?P<bounds>\d+:\d+(?:,\d+:\d+)*)\]")


def entry_name(state: str, hf_name: str, bounds: Slice) -> str:
    """Return the name of a slice of an HF tensor's state in a file."""
    return f"{state}/{hf_name}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


def owned_shards(table: Table, placement: TrainPlacement, rank: int) -> list[Shard]:
    """Return the shards that this rank writes, together with its data-parallel peers.

    If several ranks of a model replica hold the same shard, as all tensor-parallel ranks hold layer norms, one of them
    writes it. A hash of the weight's name chooses the rank, so that writes are spread over ranks.
    """
    writer: dict[tuple[str, Slice], set[tuple[int, ...]]] = {}
    for other in range(placement.world_size):
        for shard in table.megatron(placement, other):
            writer.setdefault((shard.hf_name, shard.bounds), set()).add(_replica(placement, other, shard))
    own = []
    for shard in table.megatron(placement, rank):
        replicas = sorted(writer[shard.hf_name, shard.bounds])
        chosen = replicas[crc32(shard.hf_name.encode()) % len(replicas)]
        if shard.hf_name != PADDING and chosen == _replica(placement, rank, shard):
            own.append(shard)
    return own


def _replica(placement: TrainPlacement, rank: int, shard: Shard) -> tuple[int, ...]:
    """Return a key that is the same on all ranks that divide one copy of a shard among themselves."""
    model = (placement.pp_rank(rank), placement.tp_rank(rank))
    return (*model, placement.ep_rank(rank)) if EXPERT_MARK in shard.hf_name else model


def is_first_peer(placement: TrainPlacement, rank: int, shard: Shard) -> bool:
    """Return whether this rank is the first of those that hold the same copy of a shard."""
    peers = (other for other in range(rank) if _replica(placement, other, shard) == _replica(placement, rank, shard))
    return next(peers, None) is None


def file_name(rank: int, ranks: int) -> str:
    """Return the file name of a rank."""
    return f"rank-{rank:05}-of-{ranks:05}.safetensors"


def write_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write `tensors` (on any device, with any strides) by name and return size and SHA-256.

    Contiguous host tensors are written from their own memory, all others a few megabytes at a time.

    Args:
        path: of the file.
        tensors: by name of the entry.
        metadata: of the file.
        progress: called with the number of bytes after each write.

    Raises:
        OSError: ENOSPC, EACCES, ...; nothing is left of the file.
    """
    records = [Record(name, tensor.dtype, tuple(tensor.shape), ()) for name, tensor in tensors.items()]
    records.sort(key=lambda record: -record.dtype.itemsize)
    head = header(records, metadata)

    def chunks() -> Iterator[bytes | memoryview]:
        yield head
        for record in records:
            for values in _in_shards(tensors[record.name].detach()):
                yield memoryview(values.view(-1).view(torch.uint8).numpy())

    return write_durably(path, chunks(), len(head) + sum(record.nbytes for record in records), progress)


def _in_shards(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order, as contiguous tensors on the host."""
    if not tensor.numel():
        return
    if tensor.is_cpu and tensor.is_contiguous():
        yield tensor
        return
    rows = max(1, _SHARD_BYTES * tensor.shape[0] // tensor.nbytes)
    yield from (part.contiguous().cpu() for part in tensor.split(rows))


@dataclass(frozen=True)
class TrainingFiles:
    """A checkpoint's opened files: only their headers have been read.

    Attributes:
        sources: the HF tensors by state.
        metadata: of each rank's file, by file name.
        random: each rank's own entries, by file name.
    """

    sources: Mapping[str, Source]
    metadata: Mapping[str, Mapping[str, str]]
    random: Mapping[str, Mapping[str, StoredTensor]]


def open_training_files(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> TrainingFiles:
    """Open a checkpoint of the model whose HF tensors have these shapes. No content is hashed.

    Raises:
        CheckpointError: the checkpoint is not complete, a file is missing, of another size or damaged, or the tensors
            are another model's.
    """
    manifest = complete_manifest(folder)
    found: dict[str, dict[str, HFTensor]] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    random: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(manifest.files):
        path = folder / name
        _check_size(path, manifest.files[name])
        metadata[name], random[name] = read_metadata(path), {}
        for entry, stored in read_header(path).items():
            if entry.startswith(RANDOM):
                random[name][entry.removeprefix(RANDOM)] = stored
            else:
                _add(found, entry, stored, shapes)
    sources = {state: Source(str(folder), tensors.values()) for state, tensors in found.items()}
    held = {name for state in (MASTER, WEIGHT) for name in found.get(state, ())}
    missing = sorted(shapes.keys() - held)
    if missing:
        raise CheckpointError(
            f"{folder}: no file has any part of {missing[0]} ({len(missing)} tensors are missing). Resume from another "
            "checkpoint"
        )
    return TrainingFiles(sources, metadata, random)


def _check_size(path: Path, written: Written) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Resume from an older checkpoint") from error
    if size != written.bytes:
        raise CheckpointError(f"{path}: {size} bytes instead of {written.bytes}. Resume from an older checkpoint")


def _add(
    found: dict[str, dict[str, HFTensor]],
    entry: str,
    stored: StoredTensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    parsed = _NAME.fullmatch(entry)
    if parsed is None or parsed["hf_name"] not in shapes:
        raise CheckpointError(f"{stored.file}: {entry} is not a tensor of this model. Resume with the saved model")
    name, limits = parsed["hf_name"], (interval.split(":") for interval in parsed["bounds"].split(","))
    bounds = tuple((int(start), int(stop)) for start, stop in limits)
    shape = as_matrix(shapes[name])
    fits = len(bounds) == len(shape) and all(stop <= extent for (_, stop), extent in zip(bounds, shape, strict=True))
    if not fits or tuple(stop - start for start, stop in bounds) != stored.shape:
        raise CheckpointError(
            f"{stored.file}: {entry} does not fit into a tensor of shape {shape}. Resume with the saved model"
        )
    tensor = found.setdefault(parsed["state"], {}).setdefault(name, HFTensor(name, shape))
    tensor.fragments.append(Fragment(bounds, Region.of(stored), stored.file.name))


def common_metadata(files: TrainingFiles, key: str) -> str:
    """Return the value of `key` in all ranks' files. Raises CheckpointError if the values differ or one is missing."""
    values = {name: metadata.get(key) for name, metadata in files.metadata.items()}
    known = set(values.values())
    if len(known) != 1 or None in known:
        raise CheckpointError(f"the ranks' files disagree on {key}: {json.dumps(values, sort_keys=True)}")
    return next(value for value in known if value is not None)


def read_whole(stored: StoredTensor) -> torch.Tensor:
    """Read a stored vector into a new tensor."""
    out = torch.empty(stored.shape, dtype=stored.dtype)
    Region.of(stored).read_into(out)
    return out
