"""Opens a HuggingFace folder, BF16 or FP8, as a source, and reports its errors before any tensor is read."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from post_training.checkpoint.files import INDEX_NAME, CheckpointError
from post_training.checkpoint.fp8 import BLOCK, scale_shape
from post_training.checkpoint.regions import Region, StoredTensor
from post_training.checkpoint.safetensors_files import read_header
from post_training.checkpoint.source import Fragment, HFTensor, Source
from post_training.layouts.layout import Table, as_matrix, whole_slice
from post_training.user_files import FileError, parse_json, read_text

CONFIG_NAME = "config.json"
TYPE_KEYS = ("torch_dtype", "dtype")
"""Keys of a config.json for the type of the weights; the second is transformers 5's, which reads it first."""
SCALE_SUFFIX = "_scale_inv"
JOIN_SUFFIX = "eh_proj.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Suffix of tensors that some files contain and no model needs: they follow from the configuration."""


@dataclass(frozen=True)
class HuggingfaceFolder:
    """A folder's configuration and stored tensors, including scales."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @cached_property
    def quantised(self) -> bool:
        return any(tensor.dtype == torch.float8_e4m3fn for tensor in self.tensors.values())

    @cached_property
    def files(self) -> dict[Path, list[str]]:
        """Names of the weights (not of the scales) in every file, in the order of the file."""
        files: dict[Path, list[str]] = {}
        for name, tensor in sorted(self.tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
            names = files.setdefault(tensor.file, [])
            if not name.endswith(SCALE_SUFFIX):
                names.append(name)
        return files

    def source(self, names: Collection[str] | None = None) -> Source:
        """Return the weights, or only those in `names`; FP8 weights are read as bfloat16.

        Raises:
            CheckpointError: an FP8 weight has no scale, or a scale has a wrong shape or no FP8 weight.
        """
        if names is None:
            names = [name for names in self.files.values() for name in names]
        return Source(str(self.path), [self._hf_name(name) for name in names])

    def _hf_name(self, name: str) -> HFTensor:
        tensor = self.tensors[name]
        region = Region.of(tensor, scales=self._scales(name, tensor), name=name)
        shape = as_matrix(tensor.shape)
        return HFTensor(name, shape, [Fragment(whole_slice(shape), region, str(tensor.file))])

    def _scales(self, name: str, tensor: StoredTensor) -> StoredTensor | None:
        scales = self.tensors.get(name + SCALE_SUFFIX)
        if tensor.dtype != torch.float8_e4m3fn:
            if scales is not None:
                raise CheckpointError(f"{scales.file}: {name}{SCALE_SUFFIX} belongs to a weight that is not FP8")
            return None
        if scales is None:
            raise CheckpointError(
                f"{tensor.file}: {name} is FP8, but {name}{SCALE_SUFFIX} is missing. Download the checkpoint again"
            )
        if scales.dtype != torch.float32 or scales.shape != scale_shape(tensor.shape) or len(tensor.shape) != 2:
            raise CheckpointError(
                f"{scales.file}: {name}{SCALE_SUFFIX} is {scales.dtype} {scales.shape}, but a weight {tensor.shape} "
                f"needs float32 {scale_shape(tensor.shape)}"
            )
        return scales


def open_huggingface(path: str | Path) -> HuggingfaceFolder:
    """Read configuration, index and all headers of a folder.

    Raises:
        CheckpointError: the index names a file outside the folder or disagrees with the files, a file is missing or
            truncated, a scale has no weight, or the configuration has another quantisation.
    """
    folder = Path(path)
    config = read_json(folder / CONFIG_NAME)
    _check_quantisation(folder, config)
    tensors: dict[str, StoredTensor] = {}
    weight_map = _weight_map(folder)
    for file in sorted(set(weight_map.values())):
        found = read_header(folder / file)
        listed = {name for name, where in weight_map.items() if where == file}
        for name in sorted(listed - found.keys()):
            raise CheckpointError(
                f"{folder / file}: tensor {name} is missing, but {INDEX_NAME} lists it there. Is the index from "
                "another (FP8) checkpoint, or the download incomplete?"
            )
        for name in sorted(found.keys() - listed):
            raise CheckpointError(f"{folder / file}: tensor {name} is not in {INDEX_NAME}")
        tensors |= found
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) not in tensors:
            raise CheckpointError(f"{tensor.file}: the scale {name} has no weight")
    return HuggingfaceFolder(folder, config, tensors)


def check_tensors(
    folder: HuggingfaceFolder, shapes: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
) -> None:
    """Raise CheckpointError for the first tensor that is missing, unexpected or of a wrong shape.

    Layers for multi-token prediction are accepted even if config.json has none: to train without them, a user sets its
    num_nextn_predict_layers to 0.

    Args:
        folder: the folder to check.
        shapes: of the tensors that the model needs, by name.
        ignored: prefixes of further tensors that the folder may have.
    """
    _check_present(folder, shapes)
    ignored = (*ignored, *_prediction_layers(folder, shapes))
    for name, tensor in folder.tensors.items():
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight not in shapes and not weight.startswith(ignored) and not weight.endswith(DERIVED_SUFFIX):
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is not part of the model in config.json (num_nextn_predict_layers "
                "counts layers for multi-token prediction)"
            )


def _check_present(folder: HuggingfaceFolder, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for the first of these tensors that is missing or has another shape."""
    for name, shape in shapes.items():
        if name not in folder.tensors:
            missing = sum(name not in folder.tensors for name in shapes)
            raise CheckpointError(
                f"{folder.path}: tensor {name} is missing ({missing} of {len(shapes)} are). Is config.json from this "
                "model, and is the download complete?"
            )
        if folder.tensors[name].shape != tuple(shape):
            raise CheckpointError(
                f"{folder.tensors[name].file}: tensor {name} has shape {folder.tensors[name].shape}, but config.json "
                f"implies {tuple(shape)}"
            )


def check_prediction_layers(folder: HuggingfaceFolder, table: Table) -> None:
    """Raise CheckpointError if a layer for multi-token prediction is incomplete or has another shape.

    Whole layers may be missing: training and rollout do not use them.
    """
    if table.prediction_layer is None:
        return
    numbers = {int(match[1]) for name in folder.tensors if (match := _LAYER.match(name))}
    for layer in sorted(number for number in numbers if number >= table.layers):
        _check_present(folder, table.prediction_layer(layer))


def _prediction_layers(folder: HuggingfaceFolder, shapes: Collection[str]) -> Iterator[str]:
    """Yield the prefixes of layers for multi-token prediction.

    Only these have a weight that joins a hidden state with an embedding. A layer that the model needs is never one,
    whatever tensors it has.
    """
    for name in folder.tensors:
        prefix = name.removesuffix(JOIN_SUFFIX)
        if prefix != name and not any(needed.startswith(prefix) for needed in shapes):
            yield prefix


def _weight_map(folder: Path) -> dict[str, str]:
    """Map names to file names, from the index or from the only file."""
    if not (folder / INDEX_NAME).is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(f"{folder}: {len(files)} safetensors files but no {INDEX_NAME}")
        return dict.fromkeys(read_header(files[0]), files[0].name)
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_NAME}: has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX_NAME}: {name} is listed in {file!r}, outside the folder")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if there is none."""
    try:
        text = read_text(path)
    except FileError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    try:
        content = parse_json(text, "it")
    except FileError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def with_type(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a configuration of weights of this type that are not quantised."""
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    keys = [key for key in TYPE_KEYS if key in config] or TYPE_KEYS[:1]
    return rest | dict.fromkeys(keys, str(dtype).removeprefix("torch."))


def _check_quantisation(folder: Path, config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if not quantisation:
        return
    block = quantisation.get("weight_block_size", [BLOCK, BLOCK])
    if quantisation.get("quant_method") != "fp8" or list(block) != [BLOCK, BLOCK]:
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: quantization_config {quantisation} is not FP8 with blocks of {BLOCK} x {BLOCK}"
        )
