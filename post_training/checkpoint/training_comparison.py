"""Compares a training checkpoint bit for bit with another one, or with a HuggingFace folder of the same model."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from post_training.checkpoint.comparison import compared_bytes, first_difference
from post_training.checkpoint.conversion import progress_bar
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.huggingface import CONFIG_NAME, open_huggingface, read_json
from post_training.checkpoint.regions import Region
from post_training.checkpoint.shard_conversion import Comparison
from post_training.checkpoint.source import HFTensor, Source
from post_training.checkpoint.step_files import TRAINER_NAME
from post_training.checkpoint.trained_weights import (
    described_model,
    is_of_verl,
    is_training_checkpoint,
    model_folder,
    open_weights,
)
from post_training.checkpoint.training_files import open_training_files
from post_training.layouts.layout import Table
from post_training.models.families import table_for


@dataclass(frozen=True)
class RoundedRegion(Region):
    """A region that is read in another type than it is stored in."""

    rounded: torch.dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        return self.rounded

    def read(self) -> torch.Tensor:
        """Return the region as a new tensor, rounded."""
        return Region(self.tensor, self.area).read().to(self.rounded)


def compare_trained(paths: tuple[Path, Path], config_folder: Path | None, workers: int) -> Comparison:
    """Compare two checkpoints, at least one of which is a training checkpoint.

    For two training checkpoints of the stack 2025 the whole optimizer state is compared, for others only the weights;
    with a HuggingFace folder, float32 weights are rounded to its types.

    Args:
        paths: the two checkpoints.
        config_folder: has the model's config.json, if neither checkpoint does.
        workers: number of processes.

    Raises:
        CheckpointError, ValueError: a checkpoint is not complete, or they are of different models.
    """
    given = None if config_folder is None else read_json(config_folder / CONFIG_NAME)
    config = next(filter(None, (given, *map(_config, paths))), None)
    if config is None:
        raise CheckpointError(f"{paths[0]}: does not name its model. Pass --hf-dir with its config.json")
    table = table_for(config)
    both = all(map(is_training_checkpoint, paths))
    whole = both and not any(map(is_of_verl, paths))
    sources = [_states(path, table) if whole else _weights(path, table) for path in paths]
    if not both:
        held = next(found for path, found in zip(paths, sources, strict=True) if not is_training_checkpoint(path))
        sources = [_rounded_like(found, held) for found in sources]
    left, right = (Source(str(path), list(found.values())) for path, found in zip(paths, sources, strict=True))
    missing = sorted(left.tensors.keys() ^ right.tensors.keys())
    if missing:
        raise CheckpointError(f"{missing[0]} is only in one of {paths[0]} and {paths[1]}, so they are different models")
    names = list(left.tensors)
    total = compared_bytes(left, right, names)
    with progress_bar(total, "comparing") as bar:
        difference = first_difference(left, right, names, workers, bar)
    return Comparison(difference, len(names), total, ())


def _config(path: Path) -> dict[str, Any] | None:
    """Return the model's configuration that a checkpoint contains, or None."""
    if (path / CONFIG_NAME).is_file():
        return read_json(path / CONFIG_NAME)
    described = described_model(path)
    if described is not None:
        return read_json(described / CONFIG_NAME)
    state = (path if (path / TRAINER_NAME).is_file() else path.parent) / TRAINER_NAME
    try:
        return json.loads(state.read_text()).get("model")
    except (OSError, ValueError):
        return None


def _weights(path: Path, table: Table) -> dict[str, HFTensor]:
    """Return the weights of a checkpoint by name."""
    if is_training_checkpoint(path):
        return dict(open_weights(model_folder(path), table).tensors)
    return dict(open_huggingface(path).source(list(table.shapes)).tensors)


def _states(path: Path, table: Table) -> dict[str, HFTensor]:
    """Return all tensors of a training checkpoint of the stack 2025, by state and name."""
    return {
        f"{state}/{name}": replace(tensor, name=f"{state}/{name}")
        for state, source in open_training_files(model_folder(path), table.shapes).sources.items()
        for name, tensor in source.tensors.items()
    }


def _rounded_like(found: dict[str, HFTensor], held: dict[str, HFTensor]) -> dict[str, HFTensor]:
    """Return `found` with its tensors rounded to the types that they have in `held`."""
    rounded = {}
    for name, tensor in found.items():
        if name in held and tensor.dtype != held[name].dtype:
            kind = held[name].dtype
            fragments = [
                replace(each, region=RoundedRegion(each.region.tensor, each.region.area, rounded=kind))
                for each in tensor.fragments
            ]
            tensor = HFTensor(name, tensor.shape, fragments)
        rounded[name] = tensor
    return rounded
