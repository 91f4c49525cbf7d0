"""Patches of verl's FSDP checkpoint manager: checkpoints that resume bit for bit and with any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT

if TYPE_CHECKING:
    import torch
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from verl_patches.features.training_checkpoint.fsdp_rank import FsdpRank

_MANAGER = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"
_UPSTREAM = "https://github.com/verl-project/verl/pull/3850"
# Names in a checkpoint: the rollout's random state, and the number of steps of the learning rate's schedule.
_ROLLOUT, _SCHEDULED = "rollout", "learning_rate_steps"


@wrap(
    f"{_MANAGER}.save_checkpoint",
    feature=TRAINING_CHECKPOINT,
    why="verl pickles one shard per rank, which only as many ranks can load, does not save the rollout's random "
    "numbers, and deletes the last checkpoint before the new one is written",
    upstream=_UPSTREAM,
    remove_when="the pinned verl's FSDP checkpoints can be resumed bit for bit, and by another number of ranks",
)
def save_checkpoint(
    upstream: Callable[..., None],
    self: FSDPCheckpointManager,
    local_path: str,
    hdfs_path: str | None = None,
    global_step: int = 0,
    max_ckpt_to_keep: int | None = None,
) -> None:
    from verl_patches.features.training_checkpoint.random_states import random_states
    from verl_patches.features.training_checkpoint.saving import rank_file, save_training

    rollout = getattr(self, "rollout_sharding_manager", None)  # the critic's worker has none
    tensors, texts = random_states({} if rollout is None else {_ROLLOUT: rollout.gen_random_states})
    texts[_SCHEDULED] = str(self.lr_scheduler.last_epoch)
    save_training(rank_file(Path(local_path), _rank_of(self), tensors, texts))


@wrap(
    f"{_MANAGER}.load_checkpoint",
    feature=TRAINING_CHECKPOINT,
    why="verl unpickles one shard per rank, and needs as many ranks as wrote them",
    upstream=_UPSTREAM,
    remove_when="see save_checkpoint",
)
def load_checkpoint(
    upstream: Callable[..., None],
    self: FSDPCheckpointManager,
    local_path: str | None,
    hdfs_path: str | None = None,
    del_local_after_load: bool = False,
) -> None:
    if local_path is None:
        return
    from post_training.checkpoint.resumed_rate import set_place_in_schedule
    from verl_patches.features.training_checkpoint.random_states import restore_random_states
    from verl_patches.features.training_checkpoint.restoring import load_training
    from verl_patches.features.training_checkpoint.step_folders import step_of

    def set_tracked(states: Mapping[str, torch.Tensor]) -> None:
        if _ROLLOUT in states:  # Megatron's workers have others
            self.rollout_sharding_manager.gen_random_states = states[_ROLLOUT]

    loaded = load_training(Path(local_path), _rank_of(self))
    if loaded.random is not None:
        restore_random_states(loaded.random, loaded.texts, set_tracked)
    # Megatron's workers write no place: theirs is the number of the step.
    set_place_in_schedule(self.lr_scheduler, int(loaded.texts.get(_SCHEDULED) or step_of(Path(local_path).parent)))


def _rank_of(manager: FSDPCheckpointManager) -> FsdpRank:
    """Return the manager's rank with its model and optimizer."""
    from verl.utils.fsdp_utils import fsdp_version

    from verl_patches.features.training_checkpoint.fsdp_rank import FsdpRank, FullyShardedRank

    kind = FullyShardedRank if fsdp_version(manager.model) == 2 else FsdpRank
    return kind(manager.model, manager.optimizer, manager.rank, manager.world_size)
