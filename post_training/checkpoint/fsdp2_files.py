"""Reads the weights in the files that the ranks of verl's FSDP2 engine save: `model_world_size_N_rank_R.pt`.

Every rank saves the `state_dict` of its part of a transformers model with torch.save, mostly as DTensors. Nothing in
the files is executed, and tensors are located, not loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.huggingface import read_json
from post_training.checkpoint.regions import Region, StoredTensor
from post_training.checkpoint.source import Fragment, HFTensor
from post_training.checkpoint.torch_archive import StoredPart, read_archive
from post_training.layouts.fsdp_shards import part_shards
from post_training.layouts.layout import Slice, as_matrix, matrix_shards, whole_slice

CONFIG = "fsdp_config.json"
"""verl's own file beside them, with the number of ranks."""
ADAPTER = "lora_train_meta.json"
"""verl's own file beside them, if they hold LoRA adapters."""


def fsdp2_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, HFTensor]:
    """Return a model's HuggingFace tensors in a folder's files.

    Args:
        folder: `global_step_N/actor`.
        shapes: of the model's HuggingFace tensors.

    Raises:
        CheckpointError: a rank's file is missing or damaged, or holds adapters or another model.
    """
    if (folder / ADAPTER).is_file():
        raise CheckpointError(f"{folder} has LoRA adapters ({ADAPTER}), which are not exported. Merge them with verl")
    found: dict[str, HFTensor] = {}
    places: defaultdict[str, _Place] = defaultdict(_Place)
    for file in rank_files(folder):
        state = read_archive(file)
        if not isinstance(state, dict):
            raise CheckpointError(f"{file}: not the state_dict of a model")
        for name, value in state.items():
            for fragment_of, fragment in _fragments(file, name, value, places[name], shapes):
                tensor = found.setdefault(fragment_of, HFTensor(fragment_of, as_matrix(shapes[fragment_of])))
                tensor.fragments.append(fragment)
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{folder}: no file has any part of {missing[0]} ({len(missing)} tensors are missing)")
    return found


def rank_files(folder: Path) -> list[Path]:
    """Return the files of all ranks, in order. Raises CheckpointError if one is missing."""
    ranks = read_json(folder / CONFIG).get("world_size")
    if not isinstance(ranks, int) or ranks < 1:
        raise CheckpointError(f"{folder / CONFIG}: world_size is {ranks!r}, which is not a number of ranks")
    files = [folder / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder} is not complete: {file.name} is missing")
    return files


class _Place:
    """Row of a tensor at which the next rank's part begins.

    Ranks have consecutive parts. With replicas (`fsdp_size` below the number of ranks) they begin anew once the parts
    of the ranks so far make up the tensor.
    """

    def __init__(self) -> None:
        self._next = 0

    def take(self, rows: int, extent: int) -> tuple[int, int]:
        """Return the interval of a part with this many of `extent` rows."""
        start = 0 if self._next == extent and rows else self._next
        self._next = start + rows
        return start, self._next


def _fragments(
    file: Path, name: str, value: object, place: _Place, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Fragment]]:
    """Yield the fragments of HuggingFace tensors, each with the tensor's name, in one entry of a rank's file."""
    if isinstance(value, StoredTensor):  # a buffer, which every rank saves whole
        stored, shape, bounds = value, value.shape, whole_slice(value.shape)
    elif isinstance(value, StoredPart):
        stored, shape = value.tensor, value.shape
        bounds = _bounds(file, name, value, place)
    else:
        return
    try:
        for shard in matrix_shards(part_shards(name, bounds, shape, shapes), shapes):
            wanted = as_matrix(shapes[shard.hf_name])
            if any(stop > extent for (_, stop), extent in zip(shard.bounds, wanted, strict=True)):
                raise ValueError(f"{shard.bounds} do not lie in a tensor of shape {wanted}")
            yield shard.hf_name, Fragment(shard.bounds, Region.of(stored, shard.view), f"{file.name}:{name}")
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: {name} is not a tensor of this model ({error})") from error


def _bounds(file: Path, name: str, part: StoredPart, place: _Place) -> Slice:
    """Return the region of a tensor that a part is. Raises CheckpointError if it does not lie in the tensor."""
    bounds = list(whole_slice(part.shape))
    if part.dimension is not None:
        rows = part.tensor.shape[part.dimension] if part.tensor.shape != (0,) else 0
        bounds[part.dimension] = place.take(rows, part.shape[part.dimension])
    held = tuple(stop - start for start, stop in bounds)
    inside = all(stop <= extent for (_, stop), extent in zip(bounds, part.shape, strict=True))
    if not inside or (0 not in held and held != part.tensor.shape):
        raise CheckpointError(f"{file}: {name} has shape {part.tensor.shape}, which is not a part of {part.shape}")
    return tuple(bounds)
