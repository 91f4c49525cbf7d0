"""The folders of a run's checkpoints: which are complete, which is the newest, and which may go.

A checkpoint is written as `global_step_N.partial` and renamed when everything is in it and on the disk. What has the
final name is therefore whole, unless something has damaged it since; what has not is left over from a run that ended.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from post_training.checkpoint.durable import hash_file, sync_folder, write_durably
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest, check_digests
from post_training.checkpoint.training_files import ACTOR, complete_manifest

TRAINER_NAME, TRACKER_NAME = "trainer.json", "latest_checkpointed_iteration.txt"
_PARTIAL, _DELETING = ".partial", ".deleting"
_STEP = re.compile(r"global_step_(\d+)")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies when it is complete."""
    return root / f"global_step_{step}"


def begin_step(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of a step into; what an earlier try has left there is deleted."""
    partial = _partial(root, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def complete_step(root: Path, step: int, trainer: Mapping[str, Any]) -> None:
    """Write the trainer's own state and the manifest of the whole beside what the workers have written."""
    partial = _partial(root, step)
    text = json.dumps(trainer, indent=1).encode() + b"\n"
    written = write_durably(partial / TRAINER_NAME, [text], len(text), lambda _: None)
    actor = f"{ACTOR}/{MANIFEST_NAME}"
    files = {TRAINER_NAME: written, actor: hash_file(partial / actor, lambda _: None)}
    Manifest({"tool": "training_checkpoint", "step": step}, files=files, complete=True).write(partial)


def publish_step(root: Path, step: int, keep: int | None) -> None:
    """Give the checkpoint of a step its name, and delete those that are older than the newest `keep` (None keeps all).

    Nothing is deleted before the new one is there.
    """
    final = step_folder(root, step)
    if final.exists():
        _delete(final)
    _partial(root, step).rename(final)
    sync_folder(root)
    text = str(step).encode()
    write_durably(root / TRACKER_NAME, [text], len(text), lambda _: None)
    if keep is not None:
        for number in sorted(_steps(root), reverse=True)[keep:]:
            _delete(step_folder(root, number))


def newest_step(root: Path) -> tuple[int | None, list[str]]:
    """The newest step whose checkpoint is complete, and a sentence for each newer one that is not.

    No tensor is read: the workers hold every file against its digest when they load it.
    """
    skipped = []
    for step in sorted(_steps(root), reverse=True):
        try:
            read_trainer(step_folder(root, step))
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return step, skipped
    return None, skipped


def read_trainer(folder: Path) -> dict[str, Any]:
    """The trainer's state in a complete checkpoint.

    Raises CheckpointError if the checkpoint is not complete, or a file of it is not what was written.
    """
    manifest = complete_manifest(folder)
    actor = complete_manifest(folder / ACTOR)
    for name, written in actor.files.items():
        path = folder / ACTOR / name
        if not path.is_file() or path.stat().st_size != written.bytes:
            raise CheckpointError(f"{path}: missing, or not of {written.bytes} bytes")
    try:
        found = {name: hash_file(folder / name, lambda _: None) for name in manifest.files}
        check_digests(folder, manifest.files, found, MANIFEST_NAME)
        return json.loads((folder / TRAINER_NAME).read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / TRAINER_NAME}: cannot be read ({error})") from error


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder. Raises CheckpointError for another name."""
    named = _STEP.fullmatch(folder.name)
    if named is None:
        raise CheckpointError(f"{folder}: no folder of a checkpoint, which is called global_step_ and a number")
    return int(named[1])


def _steps(root: Path) -> list[int]:
    return [int(named[1]) for folder in root.glob("global_step_*") if (named := _STEP.fullmatch(folder.name))]


def _partial(root: Path, step: int) -> Path:
    return step_folder(root, step).with_name(step_folder(root, step).name + _PARTIAL)


def _delete(folder: Path) -> None:
    """Under another name first, so that what is half deleted is not taken for a checkpoint."""
    going = folder.with_name(folder.name + _DELETING)
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)
