"""Converts a HuggingFace folder, FP8 or BF16, to Megatron shards, and back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from post_training.checkpoint.cast import carried_files, digests_of, index_text, whole_record
from post_training.checkpoint.comparison import Difference, compared_bytes, first_difference
from post_training.checkpoint.conversion import Conversion, different_entry, progress_bar
from post_training.checkpoint.files import INDEX_NAME, CheckpointError
from post_training.checkpoint.huggingface import (
    CONFIG_NAME,
    TYPE_KEYS,
    HuggingfaceFolder,
    check_prediction_layers,
    check_tensors,
    open_huggingface,
    read_json,
    with_type,
)
from post_training.checkpoint.manifest import MANIFEST_NAME
from post_training.checkpoint.megatron_form import MegatronForm, all_shapes, mtp_aliases
from post_training.checkpoint.megatron_shards import (
    ITERATION,
    TRACKER_NAME,
    open_megatron,
    recorded_form,
    shard_files,
    source_files,
)
from post_training.checkpoint.outputs import CopiedFile, OutputFile, SafetensorsFile, TextFile
from post_training.checkpoint.records import Record
from post_training.checkpoint.source import Source
from post_training.models.families import shard_shape_of, table_for
from post_training.models.training_config import PREDICTED_FURTHER, QUANTIZATION

FormOf = Callable[[Any], MegatronForm]
"""Maps the shape from which a family's shards are derived to their form."""


def to_shards(folder: HuggingfaceFolder, output: Path, form_of: FormOf, checksums: dict[str, str]) -> Conversion:
    """Plan the conversion of a folder's weights to Megatron shards.

    Raises:
        CheckpointError, ValueError: the source is not intact, or the form does not fit it.
    """
    shape = shard_shape_of(folder.config)
    form = form_of(shape)
    check_tensors(folder, all_shapes(shape, form.mtp_layers), table_for(folder.config).ignored_in_files)
    source = folder.source()
    if form.mtp_layers:
        _check_aliases(source, mtp_aliases(shape))
    config = {key: value for key, value in folder.config.items() if key != "quantization_config"}
    return Conversion(
        source_folder=folder.path,
        source_files=list(folder.files),
        source=source,
        output=output,
        arguments={"tool": "convert_ckpt_deepseek3", "form": form.as_arguments(), "config": config},
        files=list(shard_files(shape, form, source)),
        marker=TextFile(TRACKER_NAME, str(ITERATION)),
        checksums=checksums,
    )


def _check_aliases(source: Source, aliases: Mapping[str, str]) -> None:
    """Raise CheckpointError if a tensor that shards do not store differs from the one that they store in its place."""
    renamed = Source(source.name, [replace(source.tensors[original], name=name) for name, original in aliases.items()])
    difference = _first_difference(source, renamed, list(aliases), "comparing multi-token prediction's copies")
    if difference:
        raise CheckpointError(f"Megatron shards keep one embedding and one head, but here they differ: {difference}")


def _check_replicas(source: Source) -> None:
    """Raise CheckpointError if ranks have different values for the same part of a weight."""
    names = [name for name, tensor in source.tensors.items() if len(tensor.fragments) > len(tensor.distinct)]
    difference = _first_difference(source, source, names, "comparing shards that several ranks own")
    if difference:
        raise CheckpointError(f"ranks disagree: {difference}")


def _first_difference(left: Source, right: Source, names: list[str], what: str) -> Difference | None:
    with progress_bar(compared_bytes(left, right, names), what) as bar:
        return first_difference(left, right, names, 1, bar)


def to_huggingface(
    shards: Path,
    model: Path,
    output: Path,
    form: MegatronForm,
    config: Mapping[str, Any],
    file_bytes: int,
    checksums: dict[str, str],
) -> Conversion:
    """Plan the conversion of Megatron shards to a HuggingFace folder.

    Args:
        shards: folder of the shards.
        model: a folder with tokenizer and other files to copy; its weights are ignored, and its config.json, if it
            has one, must be that of the shards.
        output: folder to write.
        form: of the shards.
        config: HuggingFace configuration of the model.
        file_bytes: upper bound of a safetensors file's size, unless a single tensor is larger.
        checksums: known SHA-256 of source files, by name.

    Raises:
        CheckpointError, ValueError: the shards are not intact, have another form, or disagree with each other.
    """
    _check_config(shards, model, config)
    shape = shard_shape_of(config)
    source = open_megatron(shards, shape, form)
    _check_replicas(source)
    files = grouped([whole_record(source, name) for name in all_shapes(shape, form.mtp_layers)], file_bytes)
    written = with_type(config, source.dtype("model.embed_tokens.weight"))
    written["num_nextn_predict_layers"] = form.mtp_layers
    carried = carried_files(model)
    copies: list[OutputFile] = [CopiedFile(path.name, path) for path in carried]
    return Conversion(
        source_folder=shards,
        source_files=source_files(source),
        source=source,
        output=output,
        arguments={
            "tool": "export_hf",
            "form": form.as_arguments(),
            "file_bytes": file_bytes,
            "config": written,
            "copied_files": digests_of(carried),
        },
        files=[*files, *copies, TextFile(CONFIG_NAME, json.dumps(written, indent=2) + "\n")],
        marker=TextFile(INDEX_NAME, index_text(files)),
        checksums=checksums,
    )


def _check_config(shards: Path, model: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the model's folder describes another model than the configuration of the shards."""
    if not (model / CONFIG_NAME).is_file():
        return
    given, recorded = _of_the_model(read_json(model / CONFIG_NAME)), _of_the_model(config)
    if given != recorded:
        key, own, other = different_entry(given, recorded)
        raise CheckpointError(
            f"--hf-dir={model} is invalid: its {CONFIG_NAME} has {key}={own!r}, but {shards / MANIFEST_NAME} has "
            f"{other!r}. Set it to the folder of the model that was converted, or remove {CONFIG_NAME} there"
        )


def _of_the_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that the conversion takes from a configuration: it sets those of storage and MTP itself."""
    own = {*QUANTIZATION, *PREDICTED_FURTHER, *TYPE_KEYS, "transformers_version"}
    return {
        name: value
        for name, value in config.items()
        if value is not None and name not in own and not name.startswith("_")
    }


def grouped(records: list[Record], file_bytes: int) -> list[SafetensorsFile]:
    """Divide records, in order, into files of at most `file_bytes` each, with transformers' file names."""
    groups: list[list[Record]] = []
    size = file_bytes
    for record in records:
        if not groups or size + record.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(record)
        size += record.nbytes
    names = (f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1))
    return [SafetensorsFile(name, group) for name, group in zip(names, groups, strict=True)]


def shards_form(path: Path, form_of: FormOf, config_folder: Path | None) -> tuple[MegatronForm, dict[str, Any]]:
    """Return form and configuration of shards, from their manifest if they have one, else from the arguments."""
    recorded = recorded_form(path)
    if recorded is not None:
        return recorded
    if config_folder is None:
        raise ValueError(
            f"{path}: neither a HuggingFace folder nor shards with a manifest. Pass --hf-dir and the layout"
        )
    config = read_json(config_folder / CONFIG_NAME)
    return form_of(shard_shape_of(config)), config


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        difference: the first one; None if all compared tensors are equal.
        tensors: number of compared tensors.
        bytes: number of compared bytes.
        only_in_one: names of tensors that only one checkpoint has.
    """

    difference: Difference | None
    tensors: int
    bytes: int
    only_in_one: tuple[str, ...]


def compare_checkpoints(
    paths: tuple[Path, Path], form_of: FormOf, config_folder: Path | None, workers: int
) -> Comparison:
    """Compare two checkpoints of any kinds.

    Args:
        paths: the two checkpoints.
        form_of: returns the form of shards that have no manifest of these tools.
        config_folder: a folder with the config.json of such shards.
        workers: number of processes.

    Raises:
        CheckpointError, ValueError: a checkpoint is not intact.
    """
    (left, shapes), (right, others) = (_open_checkpoint(path, form_of, config_folder) for path in paths)
    for name in sorted(shapes.keys() | others.keys()):
        if shapes.get(name) != others.get(name):
            raise CheckpointError(
                f"two different models: {name} has the shape {shapes.get(name)} in {paths[0]} and {others.get(name)} "
                f"in {paths[1]}"
            )
    only_in_one = sorted(left.tensors.keys() ^ right.tensors.keys())
    names = [name for name in left.tensors if name in right.tensors]
    total = compared_bytes(left, right, names)
    with progress_bar(total, "comparing") as bar:
        difference = first_difference(left, right, names, workers, bar)
    return Comparison(difference, len(names), total, tuple(only_in_one))


def _open_checkpoint(
    path: Path, form_of: FormOf, config_folder: Path | None
) -> tuple[Source, Mapping[str, tuple[int, ...]]]:
    """Open a checkpoint; return it with name and shape of every tensor of its model."""
    if (path / CONFIG_NAME).exists() and any(path.glob("*.safetensors")):
        folder = open_huggingface(path)
        table = table_for(folder.config)
        check_tensors(folder, table.shapes, table.ignored_in_files)
        check_prediction_layers(folder, table)
        return folder.source(None if table.prediction_layer else table.shapes), table.shapes
    form, config = shards_form(path, form_of, config_folder)
    return open_megatron(path, shard_shape_of(config), form), table_for(config).shapes
