"""verl's FSDP workers save the model as a HuggingFace folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT

if TYPE_CHECKING:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager


@wrap(
    "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
    feature=TRAINING_CHECKPOINT,
    why="verl pickles one shard per rank, which only as many ranks can load, and deletes the last checkpoint before "
    "the new one is written",
    upstream="https://github.com/verl-project/verl/pull/3850",
    remove_when="what the pinned verl saves of FSDP is complete or not there, and loads without it",
)
def save_checkpoint(
    upstream: Callable[..., None],
    self: FSDPCheckpointManager,
    local_path: str,
    hdfs_path: str | None = None,
    global_step: int = 0,
    max_ckpt_to_keep: int | None = None,
) -> None:
    from verl_patches.features import settings
    from verl_patches.features.precision.dtypes import run_dtype
    from verl_patches.features.training_checkpoint.whole_weights import save_weights

    dtype = run_dtype(settings.current().precision)
    save_weights(Path(local_path), self.model, self.processing_class, dtype, self.rank)
