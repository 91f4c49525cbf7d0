"""Reading a HuggingFace checkpoint straight into a rank: each rank reads only the boxes that its layout names."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from verl_patches.features.reshard.layout import PADDING, Piece

INDEX_NAME = "model.safetensors.index.json"
REQUANTISE = "convert the checkpoint to bfloat16 first (scripts/fp8_cast_bf16.py)"


class CheckpointError(ValueError):
    """A checkpoint does not hold what the model needs; the message names the tensor, the file and the remedy."""


def checkpoint_files(path: str | Path) -> dict[str, Path]:
    """Map every tensor name of a HuggingFace folder to its safetensors file.

    Raises CheckpointError when the folder has no safetensors checkpoint, its index is broken or a file is missing.
    """
    folder = Path(path)
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error!r}); download it again") from error
        files = {name: folder / file for name, file in names.items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise CheckpointError(f"{file}: missing, but {INDEX_NAME} lists it; download the checkpoint again")
        return files
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(
            f"{folder}: no *.safetensors file; actor_rollout_ref.model.path must be a HuggingFace folder"
        )
    files = {}
    for shard in shards:
        with _opened(shard) as reader:
            files |= dict.fromkeys(reader.keys(), shard)
    return files


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except Exception as error:  # safetensors raises its own error class for a truncated or foreign file
        raise CheckpointError(f"{file}: not a readable safetensors file ({error}); download it again") from error


def check_names(path: str | Path, files: Mapping[str, Path], expected: Iterable[str], ignored: tuple[str, ...]) -> None:
    """Raise CheckpointError for the first tensor that is missing from the files or that no layout uses."""
    expected = set(expected)
    missing = sorted(expected - files.keys())
    if missing:
        raise CheckpointError(
            f"{path}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are); "
            "is config.json of this model, and is the download complete?"
        )
    unexpected = sorted(name for name in files.keys() - expected if not name.startswith(ignored))
    if unexpected:
        scales = any(name.endswith("_scale_inv") for name in unexpected)
        remedy = REQUANTISE if scales else "check that config.json belongs to these files"
        name = unexpected[0]
        raise CheckpointError(
            f"{files[name]}: tensor {name} has no place in the model ({len(unexpected)} like it); {remedy}"
        )


def load_from_huggingface(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    pieces: Iterable[Piece],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: tuple[str, ...] = (),
) -> int:
    """Fill the local `tensors` of one rank from a HuggingFace folder and return the number of bytes read.

    tensors: the rank's live tensors by local name; they are written in place, converted to their own dtype.
    pieces: the rank's layout; padding is set to zero.
    shapes: name and shape of every tensor that the checkpoint must have.
    ignored: prefixes of tensors that the checkpoint may have beyond those.
    Raises CheckpointError for a missing, unexpected, misshapen or quantised tensor.
    """
    files = checkpoint_files(path)
    check_names(path, files, shapes, ignored)
    wanted: dict[Path, list[Piece]] = defaultdict(list)
    with torch.no_grad():
        for piece in pieces:
            if piece.canonical == PADDING:
                piece.locate(tensors).zero_()
            else:
                wanted[files[piece.canonical]].append(piece)
        return sum(_read_file(file, wanted[file], tensors, shapes) for file in sorted(wanted))


def _read_file(
    file: Path, pieces: list[Piece], tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    count = 0
    with _opened(file) as reader:
        for piece in pieces:
            region = reader.get_slice(piece.canonical)
            found, expected = tuple(region.get_shape()), tuple(shapes[piece.canonical])
            if found != expected:
                raise CheckpointError(
                    f"{file}: tensor {piece.canonical} has shape {found}, the model needs {expected}; "
                    "check that config.json belongs to these files"
                )
            if region.get_dtype() not in ("BF16", "F16", "F32", "F64"):
                raise CheckpointError(f"{file}: tensor {piece.canonical} is {region.get_dtype()}; {REQUANTISE}")
            values = region[tuple(slice(*interval) for interval in piece.box)]
            piece.locate(tensors).copy_(values)
            count += values.numel() * values.element_size()
    return count
