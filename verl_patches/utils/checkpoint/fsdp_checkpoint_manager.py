"""verl's FSDP workers save the model as a HuggingFace folder."""

from pathlib import Path

from overlay import wrap
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT


@wrap(
    "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
    feature=TRAINING_CHECKPOINT,
    why="verl pickles a shard a rank, which only as many ranks can load, and deletes the last checkpoint before the "
    "new one is written",
    upstream="https://github.com/verl-project/verl/pull/3850",
    remove_when="what the pinned verl saves of FSDP is complete or not there, and loads without it",
)
def save_checkpoint(upstream, self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
    from verl_patches.features import settings
    from verl_patches.features.precision.dtypes import run_dtype
    from verl_patches.features.training_checkpoint.whole_weights import save_weights

    dtype = run_dtype(settings.current().precision)
    save_weights(Path(local_path), self.model, self.processing_class, dtype, self.rank)
