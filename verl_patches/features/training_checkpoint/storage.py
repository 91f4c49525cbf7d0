"""Checks of the checkpoint folder before a training: every node must see it, and it must have room."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from overlay import ConfigurationError
from post_training.checkpoint.durable import write_durably
from verl_patches.features.training_checkpoint.feature import CheckpointSettings
from verl_patches.features.training_checkpoint.step_folders import saved_steps

BYTES_OF_AN_ELEMENT = 12
"""The float32 weight and AdamW's two moments."""

_APPEARS_WITHIN_S, _POLL_S = 30.0, 1.0
_KEY = "trainer.default_local_dir"


def uses_checkpoints(options: Mapping[str, Any]) -> bool:
    """Return whether a run reads or writes checkpoints; `options`: verl's `trainer`."""
    return options["save_freq"] > 0 or options["resume_mode"] != "disable"


def check_shared(root: Path, read_everywhere: Callable[[str], Mapping[str, str]]) -> None:
    """Check that every node reads back what this one writes into `root`; make the folder if it is not there.

    Args:
        root: the checkpoint folder.
        read_everywhere: path -> the file's content by node, as `read_nonce` returns it there.

    Raises:
        ConfigurationError: the folder takes no file, or a node sees another folder or none.
    """
    nonce = uuid.uuid4().hex
    file = root / f".seen-by-all-nodes-{nonce}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_durably(file, [nonce.encode()], len(nonce), lambda _: None)
    except OSError as error:
        raise ConfigurationError(
            f"{_KEY}={root} is invalid: not writable ({error.strerror}). Choose another folder"
        ) from error
    try:
        found = read_everywhere(str(file))
    finally:
        file.unlink(missing_ok=True)
    blind = sorted(node for node, content in found.items() if content != nonce)
    if blind:
        raise ConfigurationError(
            f"{_KEY}={root} is invalid: not one folder on all nodes: {', '.join(blind)} did not see the driver's files "
            "there (an NFS mount may be missing). Set it to a folder that all nodes share, or set trainer.save_freq=-1"
        )


def read_nonce(path: str) -> str:
    """Read a file that another node has just written; return "" if it does not appear within half a minute."""
    deadline = time.monotonic() + _APPEARS_WITHIN_S
    while True:
        try:
            os.listdir(os.path.dirname(path))  # makes an NFS client ask the server again
            return Path(path).read_text()
        except OSError:
            if time.monotonic() > deadline:
                return ""
            time.sleep(_POLL_S)


def check_space(root: Path, model: Mapping[str, Any], keep: CheckpointSettings, models: int = 1) -> None:
    """Check that the disk has room for the kept checkpoints and the one being written; for one, if all are kept.

    Args:
        root: the checkpoint folder.
        model: the values of config.json; a model without a sharding spec is not checked.
        keep: the rules that keep checkpoints.
        models: 2 with a critic, which counts as equally large.

    Raises:
        ConfigurationError: there is not enough room.
    """
    from post_training.models.families import table_for

    try:
        shapes = table_for(model).shapes
    except (ValueError, KeyError):
        return
    size = models * BYTES_OF_AN_ELEMENT * sum(map(prod, shapes.values()))
    there = len(saved_steps(root)) if root.is_dir() else 0
    number = max(1, keep.keep_last + 1 - there) if keep.keep_last else 1
    folder = root
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if number * size > free:
        raise ConfigurationError(
            f"{_KEY}={root} has {_gigabytes(free)} GB free, but {number} checkpoint{'s' * (number > 1)} of "
            f"{_gigabytes(size)} GB will be written before one is deleted. Free space, choose another folder, lower "
            "actor_rollout_ref.overlay.checkpoint.keep_last, or set trainer.save_freq=-1"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.0f}" if size >= 1e10 else f"{size / 1e9:.2g}"
