"""Patches of verl's Megatron checkpoint manager: checkpoints that resume bit for bit and under another layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.training_checkpoint.feature import TRAINING_CHECKPOINT

if TYPE_CHECKING:
    import torch
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    from post_training.checkpoint.training_rank import MegatronRank

_MANAGER = "verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager"
_UPSTREAM = "https://github.com/verl-project/verl/pull/3850"


@wrap(
    f"{_MANAGER}.save_checkpoint",
    feature=TRAINING_CHECKPOINT,
    why="verl saves no optimizer step, writes one rank's experts for all expert-parallel ones, pickles everything, "
    "and deletes the last checkpoint before the new one is written",
    upstream=_UPSTREAM,
    remove_when="the pinned verl's checkpoints can be resumed bit for bit, and under another layout",
)
def save_checkpoint(
    upstream: Callable[..., None],
    self: MegatronCheckpointManager,
    local_path: str,
    hdfs_path: str | None = None,
    global_step: int = 0,
    max_ckpt_to_keep: int | None = None,
) -> None:
    import torch
    from megatron.core import tensor_parallel

    from verl_patches.features import settings
    from verl_patches.features.training_checkpoint import background
    from verl_patches.features.training_checkpoint.feature import writes_in_background
    from verl_patches.features.training_checkpoint.random_states import random_states
    from verl_patches.features.training_checkpoint.saving import rank_file, save_training
    from verl_patches.workers.process_residency import process_residency

    tensors, texts = random_states(tensor_parallel.get_cuda_rng_tracker().get_states())
    torch.npu.synchronize()  # a swapping optimizer's copies may still be on their way to the host
    file = rank_file(Path(local_path), _rank_of(self), tensors, texts)
    if writes_in_background(settings.current()):
        background.process_writer().begin(file, process_residency().copy_out(background.GROUPS[self.role]))
    else:
        save_training(file)


@wrap(
    f"{_MANAGER}.load_checkpoint",
    feature=TRAINING_CHECKPOINT,
    why="verl loads optimizer state into an optimizer that has none yet, and fails",
    upstream=_UPSTREAM,
    remove_when="see save_checkpoint",
)
def load_checkpoint(
    upstream: Callable[..., None],
    self: MegatronCheckpointManager,
    local_path: str | None,
    hdfs_path: str | None = None,
    del_local_after_load: bool = False,
) -> None:
    if local_path is None:
        return
    from megatron.core import tensor_parallel

    from verl_patches.features.training_checkpoint.random_states import restore_random_states
    from verl_patches.features.training_checkpoint.restoring import load_training

    tracker = tensor_parallel.get_cuda_rng_tracker()

    def set_tracked(states: Mapping[str, torch.Tensor]) -> None:
        known = tracker.get_states()
        tracker.set_states(known | {name: state for name, state in states.items() if name in known})

    loaded = load_training(Path(local_path), _rank_of(self))
    if loaded.random is not None:
        restore_random_states(loaded.random, loaded.texts, set_tracked)


def _rank_of(manager: MegatronCheckpointManager) -> MegatronRank:
    """Return the manager's rank with its model and optimizer."""
    from megatron.core.utils import get_model_config

    from post_training.checkpoint.training_rank import MegatronRank
    from post_training.layouts.model_tensors import train_tensors
    from post_training.layouts.placements import train_placement
    from post_training.layouts.value_model import value_table
    from post_training.models.families import table_for

    placement, table = train_placement(get_model_config(manager.model[0])), table_for(manager.hf_config)
    table = value_table(table) if manager.is_value_model else table
    return MegatronRank(table, placement, manager.rank, train_tensors(manager.model), manager.optimizer)
