"""Opens the weights of a training checkpoint, of either stack, as HuggingFace tensors.

    stack 2025           global_step_N/actor/rank-*-of-*.safetensors       slices of every weight, in float32
    stack 2026, FSDP2    global_step_N/actor/model_world_size_*.pt         each rank's part of the model
    stack 2026, Megatron global_step_N/actor/model/huggingface             whole weights, which mbridge has gathered

Only headers are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from post_training.checkpoint.complete_files import check_files
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.fsdp2_files import CONFIG, fsdp2_tensors
from post_training.checkpoint.huggingface import CONFIG_NAME, check_tensors, open_huggingface, read_json
from post_training.checkpoint.source import HFTensor
from post_training.checkpoint.step_files import ACTOR, complete_manifest
from post_training.checkpoint.training_files import MASTER, WEIGHT, open_training_files
from post_training.layouts.layout import Table

CONTENTS = "ckpt_contents.json"
"""File of verl's manager for Megatron, written last: where each part of the checkpoint is."""
_RANKS_OF_2025 = "rank-*-of-*.safetensors"
# Files and folders of verl's managers, of which an interrupted save leaves some.
_MARKS_OF_VERL = (CONFIG, "model_world_size_*_rank_*.pt", CONTENTS, "*/dist_ckpt", "model/huggingface")
_OUTPUT_LAYER = "lm_head."
_ADAPTERS = "peft_adapters"


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of a checkpoint.

    Attributes:
        tensors: by HF name.
        updated: names of float32 tensors that an optimizer updates; an export rounds them to the model's type.
    """

    tensors: Mapping[str, HFTensor]
    updated: frozenset[str]


def is_training_checkpoint(folder: Path) -> bool:
    """Return whether this is the folder of a step, or of the model inside it, as training saves it."""
    return any(_is_model(each) for each in (folder, folder / ACTOR))


def is_of_verl(folder: Path) -> bool:
    """Return whether verl's own managers saved the folder of a step, or of the model inside it: the stack 2026."""
    return any(not _is_of_2025(each) and _is_model(each) for each in (folder, folder / ACTOR))


def model_folder(folder: Path) -> Path:
    """Return the folder of the trained model: `folder` itself, or the one inside the folder of a step.

    Raises:
        CheckpointError: the step is not complete.
    """
    if _is_of_2025(folder):
        return folder
    if _is_model(folder):
        check_files(folder.parent)
        return folder
    if _is_of_2025(folder / ACTOR):
        complete_manifest(folder)
    else:
        check_files(folder)
    return folder / ACTOR


def described_model(folder: Path) -> Path | None:
    """Return the folder that verl saved with a checkpoint's config.json and tokenizer; None if there is none.

    Args:
        folder: of a step, or of the model inside it.
    """
    actors = (folder, folder / ACTOR)
    found = (actor / inside for actor in actors for inside in ("huggingface", "model/huggingface"))
    return next((each for each in found if (each / CONFIG_NAME).is_file()), None)


def open_weights(actor: Path, table: Table) -> TrainedWeights:
    """Open the weights of a trained model.

    Args:
        actor: its folder, from `model_folder`.
        table: its sharding spec.

    Raises:
        CheckpointError: a file is missing or damaged, the weights are another model's, or in a form that is not read.
    """
    if _is_of_2025(actor):
        sources = open_training_files(actor, table.shapes).sources
        master, others = (sources[state].tensors if state in sources else {} for state in (MASTER, WEIGHT))
        return TrainedWeights({**others, **master}, frozenset(master))
    tensors = fsdp2_tensors(actor, table.shapes) if (actor / CONFIG).is_file() else _of_megatron(actor, table)
    updated = (name for name, each in tensors.items() if each.dtype == torch.float32)
    return TrainedWeights(tensors, frozenset(name for name in updated if not name.endswith(table.float32)))


def _of_megatron(actor: Path, table: Table) -> Mapping[str, HFTensor]:
    contents: Mapping[str, Any] = read_json(actor / CONTENTS).get("contents", {})
    model = contents.get("hf_model", contents.get("model", {}))
    if model.get("format") != "huggingface" or _ADAPTERS in contents:
        kept = f"only {_ADAPTERS}" if _ADAPTERS in contents else f"the model as {model.get('format')}"
        raise CheckpointError(
            f"{actor / CONTENTS}: has {kept}, which is not exported. Resume the run with "
            "actor_rollout_ref.actor.megatron.use_dist_checkpointing=false and save again"
        )
    folder = open_huggingface(actor / model["path"])
    tied = () if any(name.startswith(_OUTPUT_LAYER) for name in table.shapes) else (_OUTPUT_LAYER,)
    check_tensors(folder, table.shapes, (*table.ignored_in_files, *tied))
    return folder.source(list(table.shapes)).tensors


def _is_of_2025(folder: Path) -> bool:
    return any(folder.glob(_RANKS_OF_2025))


def _is_model(folder: Path) -> bool:
    return any(any(folder.glob(mark)) for mark in (_RANKS_OF_2025, *_MARKS_OF_VERL))
