"""Exports a training checkpoint as a HuggingFace folder: the float32 weights, rounded once to the model's type.

Works for every family that has a sharding spec, and for checkpoints of both stacks (`trained_weights`). Tensors are
read in slices; no model is built.
"""

import json
from collections.abc import Set as AbstractSet
from pathlib import Path

import torch

from post_training.checkpoint.cast import carried_files, digests_of, index_text, whole_record
from post_training.checkpoint.conversion import Conversion
from post_training.checkpoint.files import INDEX_NAME, CheckpointError
from post_training.checkpoint.huggingface import CONFIG_NAME, TYPE_KEYS, read_json, with_type
from post_training.checkpoint.outputs import CopiedFile, OutputFile, TextFile
from post_training.checkpoint.shard_conversion import grouped
from post_training.checkpoint.source import HFTensor, Source
from post_training.checkpoint.trained_weights import model_folder, open_weights
from post_training.layouts.layout import Slice
from post_training.models.families import family_of, table_for

_EMBEDDING = "model.embed_tokens.weight"
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class RoundedSource(Source):
    """Weights of a training checkpoint: those in `master` are read in the type `rounded`, all others as stored."""

    def __init__(self, name: str, tensors: list[HFTensor], master: AbstractSet[str], rounded: torch.dtype) -> None:
        super().__init__(name, tensors)
        self._master, self._rounded = master, rounded

    def dtype(self, hf_name: str) -> torch.dtype:
        return self._rounded if hf_name in self._master else super().dtype(hf_name)

    def read_into(self, hf_name: str, bounds: Slice, out: torch.Tensor) -> None:
        """Fill `out`, of the slice's extents and of `dtype(hf_name)`."""
        stored = super().dtype(hf_name)
        if stored == out.dtype:
            super().read_into(hf_name, bounds, out)
        else:
            whole = torch.empty(out.shape, dtype=stored)
            super().read_into(hf_name, bounds, whole)
            out.copy_(whole)


def trained_to_huggingface(
    folder: Path, model: Path, output: Path, file_bytes: int, checksums: dict[str, str]
) -> Conversion:
    """Plan the export of a training checkpoint as a HuggingFace folder.

    Args:
        folder: of a step, or of the model inside it.
        model: a folder with the model's config.json, whose `torch_dtype` (transformers 5: `dtype`) determines the
            type, and with the files to copy; its weights are ignored.
        output: folder to write.
        file_bytes: upper bound of a file's size, unless a single tensor is larger.
        checksums: known SHA-256 of source files, by name.

    Raises:
        CheckpointError, ValueError: the checkpoint is not complete, or is not of that model.
    """
    actor = model_folder(folder)
    config = read_json(model / CONFIG_NAME)
    key = next((name for name in TYPE_KEYS if name in config), TYPE_KEYS[0])
    named = config.get(key)
    if named not in TYPES:
        raise CheckpointError(
            f"{model / CONFIG_NAME}: {key}={named!r} is invalid. Set it to the type to write, one of {', '.join(TYPES)}"
        )
    table = table_for(config)
    weights = open_weights(actor, table)
    source = RoundedSource(str(actor), list(weights.tensors.values()), weights.updated, TYPES[named])
    written = grouped([whole_record(source, name, shape) for name, shape in table.shapes.items()], file_bytes)
    config = with_type(config, source.dtype(_EMBEDDING))  # a checkpoint may have less than its model
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0  # such layers are not trained, so there are none to write
    carried = carried_files(model)
    copies: list[OutputFile] = [CopiedFile(path.name, path) for path in carried]
    return Conversion(
        source_folder=actor,
        source_files=sorted({fragment.region.tensor.file for t in source.tensors.values() for fragment in t.fragments}),
        source=source,
        output=output,
        arguments={
            "tool": "export_hf",
            "family": family_of(config).name,
            "torch_dtype": named,
            "file_bytes": file_bytes,
            "config": config,
            "copied_files": digests_of(carried),
        },
        files=[*written, *copies, TextFile(CONFIG_NAME, json.dumps(config, indent=2) + "\n")],
        marker=TextFile(INDEX_NAME, index_text(written)),
        checksums=checksums,
    )
