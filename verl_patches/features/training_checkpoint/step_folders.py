"""The folders of a run's checkpoints: writing, publishing, finding the newest, and deleting.

A checkpoint is written as `global_step_N.partial` and renamed once everything in it is on the disk. A folder with the
final name is therefore complete, unless something has damaged it since; a partial one is left over from a run that
ended.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from post_training.checkpoint.durable import hash_file, sync_folder, write_durably
from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest, check_digests, describe_missing
from post_training.checkpoint.step_files import ACTOR, CRITIC, TRAINER_NAME, complete_manifest

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_PARTIAL, _DELETING, _SET_ASIDE = ".partial", ".deleting", ".set_aside"
_STEP = re.compile(r"global_step_(\d+)")


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint once it is complete."""
    return root / f"global_step_{step}"


def begin_step(root: Path, step: int) -> Path:
    """Make an empty folder for the checkpoint of a step; delete what an earlier attempt has left there."""
    partial = _partial(root, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def complete_step(root: Path, step: int, trainer: Mapping[str, Any]) -> None:
    """Write the trainer's own state and the manifest of the whole checkpoint beside the workers' files.

    Raises:
        CheckpointError: a worker's file has gone or changed since it was written.
    """
    partial = _partial(root, step)
    text = json.dumps(trainer, indent=1).encode() + b"\n"
    written = write_durably(partial / TRAINER_NAME, [text], len(text), lambda _: None)
    manifests = [f"{model}/{MANIFEST_NAME}" for model in (ACTOR, CRITIC) if (partial / model).is_dir()]
    files = {TRAINER_NAME: written} | {name: hash_file(partial / name, lambda _: None) for name in manifests}
    for name in manifests:
        folder = (partial / name).parent
        problem = describe_missing(folder, complete_manifest(folder).files)
        if problem:
            raise CheckpointError(problem)
    Manifest({"tool": "training_checkpoint", "step": step}, files=files, complete=True).write(partial)


def publish_step(root: Path, step: int) -> None:
    """Give the checkpoint of a step its final name, and name it in verl's tracker file."""
    final = step_folder(root, step)
    if final.exists():
        _delete(final)
    _partial(root, step).rename(final)
    sync_folder(root)
    text = str(step).encode()
    write_durably(root / TRACKER_NAME, [text], len(text), lambda _: None)


def delete_steps(root: Path, steps: Iterable[int]) -> None:
    """Delete these checkpoints, and leftovers of interrupted deletions and saves; call it only while nothing saves."""
    for step in steps:
        _delete(step_folder(root, step))
    for left in (*root.glob(f"global_step_*{_DELETING}"), *root.glob(f"global_step_*{_PARTIAL}")):
        shutil.rmtree(left, ignore_errors=True)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename checkpoints of steps after `after`, which the run that resumed from there has not written; return the new
    names.

    Renamed checkpoints are neither resumed from nor counted. The newest goes first, so that an interruption leaves no
    gap.
    """
    moved = []
    for step in sorted((step for step in saved_steps(root) if step > after), reverse=True):
        number = 1
        while (aside := step_folder(root, step).with_name(f"global_step_{step}{_SET_ASIDE}.{number}")).exists():
            number += 1
        step_folder(root, step).rename(aside)
        moved.append(aside)
    return moved


def scores_of(root: Path, metric: str) -> dict[int, float]:
    """Return the value of `metric` by step, for the checkpoints that have kept one."""
    found = {}
    for step in saved_steps(root):
        try:
            score = json.loads((step_folder(root, step) / TRAINER_NAME).read_text()).get("score")
        except (OSError, ValueError):
            continue
        if score and score["metric"] == metric:
            found[step] = score["value"]
    return found


def newest_step(root: Path) -> tuple[int | None, list[str]]:
    """Return the newest step whose checkpoint is complete, and a sentence for each newer one that is not.

    No tensor is read: the workers check every file against its digest when they load it.
    """
    skipped = []
    for step in sorted(saved_steps(root), reverse=True):
        try:
            read_trainer(step_folder(root, step))
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return step, skipped
    return None, skipped


def read_trainer(folder: Path) -> dict[str, Any]:
    """Read the trainer's state of a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, or one of its files is not as it was written.
    """
    manifest = complete_manifest(folder)
    for model in (ACTOR, *([CRITIC] if f"{CRITIC}/{MANIFEST_NAME}" in manifest.files else [])):
        for name, written in complete_manifest(folder / model).files.items():
            path = folder / model / name
            if not path.is_file() or path.stat().st_size != written.bytes:
                raise CheckpointError(f"{path}: missing, or does not have {written.bytes} bytes")
    try:
        found = {name: hash_file(folder / name, lambda _: None) for name in manifest.files}
        check_digests(folder, manifest.files, found, MANIFEST_NAME)
        return json.loads((folder / TRAINER_NAME).read_text())
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / TRAINER_NAME}: cannot be read ({error})") from error


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder.

    Raises:
        CheckpointError: the folder is not named like a checkpoint.
    """
    named = _STEP.fullmatch(folder.name)
    if named is None:
        raise CheckpointError(f"{folder}: not the folder of a checkpoint, which is named global_step_ and a number")
    return int(named[1])


def saved_steps(root: Path) -> list[int]:
    """Return the steps whose checkpoints have their final names."""
    return [int(named[1]) for folder in root.glob("global_step_*") if (named := _STEP.fullmatch(folder.name))]


def _partial(root: Path, step: int) -> Path:
    return step_folder(root, step).with_name(step_folder(root, step).name + _PARTIAL)


def _delete(folder: Path) -> None:
    """Delete a checkpoint; rename it first, so that a half-deleted one is not taken for a checkpoint."""
    going = folder.with_name(folder.name + _DELETING)
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)
