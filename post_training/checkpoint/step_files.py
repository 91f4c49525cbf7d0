"""Names inside the folder of a step, for code that reads no tensors. Needs no torch."""

from pathlib import Path

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.manifest import MANIFEST_NAME, Manifest

ACTOR = "actor"
"""The folder of the trained model inside the folder of a step."""

CRITIC = "critic"
"""The folder of PPO's critic beside it, if the run has one."""

TRAINER_NAME = "trainer.json"
"""The driver's own state in the folder of a step."""


def complete_manifest(folder: Path) -> Manifest:
    """Return the folder's manifest. Raises CheckpointError unless it is there and marked as complete."""
    manifest = Manifest.read(folder)
    if manifest is None or not manifest.complete:
        raise CheckpointError(
            f"{folder}: not a complete checkpoint, {MANIFEST_NAME} is missing or unfinished. Resume from an older one"
        )
    return manifest
