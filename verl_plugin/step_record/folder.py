"""The folder of a recorded step: the inputs of its update, its metrics, and the weights before it.

    step_3/record.json          keys, metrics, configuration without secrets, sizes and SHA-256 of the other files
    step_3/samples.safetensors  the columns of all samples
    step_3/weights/             hard links to the checkpoint behind step 2; none for a model that was not trained yet

The links store no file of a checkpoint twice, and keep the files when the run deletes the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from post_training.checkpoint.durable import hash_file, sync_folder, write_text_durably
from post_training.user_files import read_object

RECORD, SAMPLES, WEIGHTS = "record.json", "samples.safetensors", "weights"
FORMAT = 1
_LENGTHS = ".lengths"
_MIB = 1 << 20


class RecordError(ValueError):
    """A step cannot be recorded or read; the message is one sentence."""


@dataclass(frozen=True)
class Column:
    """A field of all samples.

    Attributes:
        rows: one tensor per sample, all of one type and, except for the first dimension, of one shape.
        jagged: whether the first dimension may differ, as with the tokens of sequences. If not, verl holds the field
            as one dense tensor.
    """

    rows: list[torch.Tensor]
    jagged: bool

    @property
    def bytes(self) -> int:
        """Bytes that the rows take in memory."""
        return sum(row.nbytes for row in self.rows)

    def tensor(self, samples: slice = slice(None)) -> torch.Tensor:
        """Return the column as verl's workers get it: jagged [samples, tokens, ...] or dense [samples, ...]."""
        rows = self.rows[samples]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged) if self.jagged else torch.stack(rows)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Column:
        """Make a column on the host from such a tensor."""
        return cls([row.detach().cpu().contiguous() for row in tensor.unbind()], tensor.is_nested)


@dataclass(frozen=True)
class RecordedStep:
    """A step, before and after.

    Attributes:
        step: its number.
        keys: verl's names of the samples, `<prompt>_<answer>_<part>`, in the order of the batch.
        columns: the fields that are tensors.
        given: values that the trainer passed to the workers beside the samples, such as the sizes of mini-batches.
        metrics: of the step, up to the update.
        config: of the whole job, without secrets.
        dies: number of dies that trained.
        left_out: names of fields that are not tensors.
        padding: those of `keys` that verl added to fill the batch, and of which no token is trained.
    """

    step: int
    keys: list[str]
    columns: Mapping[str, Column]
    given: Mapping[str, Any]
    metrics: Mapping[str, Any]
    config: Mapping[str, Any]
    dies: int
    left_out: list[str] = field(default_factory=list)
    padding: list[str] = field(default_factory=list)


def write_record(folder: Path, record: RecordedStep, weights: Path | None, most_mib: int) -> None:
    """Write a record's folder atomically: it is complete or does not exist.

    Args:
        folder: must not exist.
        record: the step.
        weights: folder of the checkpoint after the step before; None if there is none.
        most_mib: upper bound of the samples' size in MiB.

    Raises:
        RecordError: the samples take more.
        OSError: the folder cannot be written; nothing of it is left.
    """
    size = sum(column.bytes for column in record.columns.values())
    if size > most_mib * _MIB:
        raise RecordError(f"its samples take {size / _MIB:.0f} MiB, more than trainer.record_max_mib={most_mib}")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, column in record.columns.items():
            tensors[name] = torch.cat(column.rows) if column.jagged else torch.stack(column.rows)
            if column.jagged:
                tensors[name + _LENGTHS] = torch.tensor([len(row) for row in column.rows])
        save_file(tensors, partial / SAMPLES)
        if weights is not None:
            shutil.copytree(weights, partial / WEIGHTS, copy_function=_link)
        written = hash_file(partial / SAMPLES, lambda _: None)
        content = {
            "format": FORMAT,
            **{name: value for name, value in vars(record).items() if name != "columns"},
            "files": {SAMPLES: vars(written)},
            "weights": weights is not None,
        }
        write_text_durably(partial / RECORD, json.dumps(content, indent=1, default=str) + "\n")
        partial.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def read_record(folder: Path) -> tuple[RecordedStep, Path | None]:
    """Return a recorded step, and the folder of the weights before it, None if it has none.

    Raises:
        RecordError: the folder is no recorded step, or is incomplete or damaged.
    """
    try:
        content = dict(read_object(folder / RECORD))
    except (OSError, ValueError) as error:
        raise RecordError(f"{folder} is not a recorded step: {RECORD} cannot be read ({error})") from error
    if content.pop("format", None) != FORMAT:
        raise RecordError(
            f"{folder / RECORD} has another format than {FORMAT}. Replay it with the release that wrote it"
        )
    for name, expected in content.pop("files").items():
        path = folder / name
        if not path.is_file():
            raise RecordError(f"{folder} is not complete: {name} is missing")
        if vars(hash_file(path, lambda _: None)) != expected:
            raise RecordError(f"{path} is damaged: its SHA-256 differs from {RECORD}")
    weights = folder / WEIGHTS if content.pop("weights") else None
    if weights is not None and not weights.is_dir():
        raise RecordError(f"{folder} is not complete: {WEIGHTS} is missing")
    tensors = load_file(folder / SAMPLES)
    columns = {
        name: Column(list(values.split(tensors[name + _LENGTHS].tolist())), True)
        if name + _LENGTHS in tensors
        else Column(list(values.unbind()), False)
        for name, values in tensors.items()
        if not name.endswith(_LENGTHS)
    }
    return RecordedStep(columns=columns, **content), weights
