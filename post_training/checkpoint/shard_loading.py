"""Loads a training rank from its own Megatron shard, checked against the manifest and without unpickling it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest, check_digests
from post_training.checkpoint.megatron_form import MegatronForm
from post_training.checkpoint.megatron_shards import TRACKER_NAME, read_models, recorded_form, shard_path
from post_training.checkpoint.regions import Region, StoredTensor
from post_training.layouts.layout import TrainPlacement

_COPY_BYTES = 64 << 20


def is_shard_folder(path: Path) -> bool:
    """Return whether a folder holds Megatron's own shards; its tracker file is written when they are complete."""
    return (path / TRACKER_NAME).is_file() and any(path.glob("*/mp_rank_*"))


def load_shard(
    root: Path,
    placement: TrainPlacement,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Fill the live tensors of a rank from its shard and return the number of bytes read.

    Args:
        root: folder of the shards.
        placement: training's.
        rank: the rank to load.
        tensors: by local name, written in place and converted to their own types.
        progress: called with the number of bytes after each part that was hashed or read.

    Raises:
        CheckpointError: the shards have another layout, the rank's shard has another SHA-256 than in the manifest, or a
            tensor is missing, unexpected or of another shape.
    """
    manifest = Manifest.read(root)
    if manifest is not None:
        _check_form(root, placement)
    file = shard_path(root, placement, rank)
    if manifest is not None:
        found = {str(file.relative_to(root)): hash_file(file, progress)}
        check_digests(root, manifest.files, found, str(root / MANIFEST_NAME))
    stored = {
        placement.chunk_prefix(chunk) + name: tensor
        for chunk, model in enumerate(read_models(file, placement.virtual_stages))
        for name, tensor in model.items()
        if isinstance(tensor, StoredTensor) and not name.endswith("_extra_state")
    }
    for name in sorted(stored.keys() ^ tensors.keys()):
        where = "the shard" if name in tensors else "the model"
        raise CheckpointError(f"{file}: tensor {name} is missing in {where}. Is the layout another one?")
    with torch.no_grad():
        return sum(
            _fill(tensors[name].data, tensor, f"{file}: tensor {name}", progress) for name, tensor in stored.items()
        )


def _check_form(root: Path, placement: TrainPlacement) -> None:
    """Check that shards and training have the same layout, except for data parallel copies and vocabulary padding."""
    recorded = recorded_form(root)
    if recorded is None:
        return
    expected = MegatronForm(replace(placement, dp=placement.ep, vocab_padded=None))
    if recorded[0] != expected:
        raise CheckpointError(f"{root}: its shards have the layout {recorded[0]}, but training has {expected}")


def _fill(target: torch.Tensor, tensor: StoredTensor, what: str, progress: Callable[[int], None]) -> int:
    if tuple(target.shape) != tensor.shape:
        raise CheckpointError(f"{what} has shape {tensor.shape}, but the model needs {tuple(target.shape)}")
    region = Region.of(tensor)
    rows = target.unsqueeze(0) if target.dim() == 1 else target
    for top, bottom in region.area.slabs(tensor.dtype.itemsize, _COPY_BYTES):
        part = replace(region, area=region.area.part(((top, bottom), (0, region.area.columns))))
        values = part.read()
        rows[top:bottom].copy_(values)
        progress(values.nbytes)
    return tensor.nbytes
