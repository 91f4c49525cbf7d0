"""Casts an FP8 folder to bfloat16: same files, same names, no scales."""

import json
from pathlib import Path

import torch

from post_training.checkpoint.conversion import Conversion
from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.files import INDEX_NAME, CheckpointError
from post_training.checkpoint.huggingface import (
    CONFIG_NAME,
    check_prediction_layers,
    check_tensors,
    open_huggingface,
    with_type,
)
from post_training.checkpoint.manifest import MANIFEST_NAME
from post_training.checkpoint.outputs import CopiedFile, SafetensorsFile, TextFile
from post_training.checkpoint.records import Record
from post_training.checkpoint.source import Source
from post_training.layouts.layout import Shard, whole_slice
from post_training.models.families import table_for

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


def cast_conversion(source: Path, output: Path, checksums: dict[str, str]) -> Conversion:
    """Plan the cast of the folder `source`. Raises CheckpointError if it is no intact FP8 checkpoint."""
    folder = open_huggingface(source)
    if not folder.quantised:
        raise CheckpointError(f"{source}: no tensor is FP8, so there is nothing to cast")
    table = table_for(folder.config)
    check_tensors(folder, table.shapes, table.ignored_in_files)
    check_prediction_layers(folder, table)
    tensors = folder.source()
    files = [
        SafetensorsFile(file.name, [whole_record(tensors, name) for name in names])
        for file, names in folder.files.items()
        if names
    ]
    carried = carried_files(source)
    copies = [CopiedFile(path.name, path) for path in carried]
    index = index_text(files)
    config = with_type(folder.config, torch.bfloat16)
    return Conversion(
        source_folder=source,
        source_files=[*folder.files, *carried],
        source=tensors,
        output=output,
        arguments={"tool": "fp8_cast_bf16", "config": config},
        files=[*files, *copies, TextFile(CONFIG_NAME, json.dumps(config, indent=2) + "\n")],
        marker=TextFile(INDEX_NAME, index),
        checksums=checksums,
    )


def digests_of(carried: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of files to copy from another folder than the source's, by name, for the manifest."""
    return {path.name: hash_file(path, lambda _: None).sha256 for path in carried}


def whole_record(source: Source, name: str, shape: tuple[int, ...] | None = None) -> Record:
    """Return the record of a whole tensor in a HuggingFace file; `shape` replaces the matrix shape of its source."""
    tensor = source.tensors[name]
    return Record(name, source.dtype(name), shape or tensor.shape, (Shard(name, whole_slice(tensor.shape), name),))


def index_text(files: list[SafetensorsFile]) -> str:
    """Return the content of model.safetensors.index.json for these files."""
    records = [(record, file.path) for file in files for record in file.records]
    total = sum(record.nbytes for record, _ in records)
    weight_map = {record.name: path for record, path in records}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n"


def carried_files(folder: Path) -> list[Path]:
    """Return the files to copy unchanged, such as tokenizer, generation settings and model code: all but weights."""
    replaced = (CONFIG_NAME, INDEX_NAME, MANIFEST_NAME)
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.name not in replaced
        and path.suffix not in _WEIGHT_FILES
        and not path.name.startswith(".")
    )
