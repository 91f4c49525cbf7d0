"""The rehearsal's tiny models with random weights, norms and biases, in float32."""

from pathlib import Path

from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.stack_2026.plan import CHANGES
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint

MODELS = ("qwen3", "qwen3_moe", "deepseek_v3")


def make_checkpoints(folder: Path) -> list[Path]:
    """Write a checkpoint of each of `MODELS` to a folder with its name, and return the folders."""
    for name in MODELS:
        changes = tuple(CHANGES.get(name, {}).items())
        request = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, "float32", warm_start=None, model_type=name, changes=changes)
        make_checkpoint(request, folder / name, lambda *_: None)
    return [folder / name for name in MODELS]
