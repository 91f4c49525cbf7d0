"""Patches of verl's weight loading, which go by the sharding specs: each rank reads only its own slices or shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.compatibility.feature import OWN_MODELS

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from torch import nn
    from transformers import PretrainedConfig


@wrap(
    "verl.utils.model:load_megatron_gptmodel_weights",
    feature=OWN_MODELS,
    why="verl builds the whole model on rank 0's host and does not know the parameters of the models built here; "
    "every rank reads only its own slices of the files",
    upstream="not forwarded: needs this project's sharding specs",
    remove_when="verl loads HuggingFace weights shard by shard into every model on the pinned megatron-core",
    evidence="executed",
)
def load_megatron_gptmodel_weights(
    upstream: Callable[..., None],
    config: DictConfig,
    model_config: PretrainedConfig,
    parallel_model: list[nn.Module],
    params_dtype: torch.dtype,
    is_value_model: bool = False,
    **options: Any,
) -> None:
    from post_training.models.families import find_family, table_for

    if find_family(model_config) is None:
        return upstream(config, model_config, parallel_model, params_dtype, is_value_model, **options)
    import torch.distributed as dist
    from verl.utils.fs import copy_to_local

    from post_training.checkpoint.loading import ignored_prefixes, load_from_huggingface
    from post_training.hang_detection.progress import file_progress
    from post_training.layouts.model_tensors import train_tensors, unwrapped
    from post_training.layouts.placements import train_placement
    from post_training.layouts.value_model import without_head
    from verl_patches.features.critic.head import begin_head

    table = table_for(model_config)
    placement = train_placement(unwrapped(parallel_model[0]).config)
    # verl at the cluster's pin has no such argument; elsewhere it is off unless asked for.
    copying = {"use_shm": True} if config.model.get("use_shm") else {}
    # The key load_from_hf is the actor's; a critic's weights are in its own model.path.
    loaded_directly = None if is_value_model else settings.current().load_from_hf
    folder = loaded_directly or copy_to_local(config.model.path, **copying)
    tensors, shards = train_tensors(parallel_model), table.megatron(placement, dist.get_rank())
    if is_value_model:
        shards = without_head(shards)
        begin_head(tensors, model_config.initializer_range, config.megatron.seed)
    load_from_huggingface(folder, tensors, shards, table.shapes, ignored_prefixes(folder), file_progress)


@wrap(
    "verl.utils.model:load_mcore_dist_weights",
    feature=OWN_MODELS,
    why="verl reads only Megatron's distributed checkpoints; the published recipe trains from mp_rank shards, one per "
    "rank",
    upstream="not forwarded: verl gave up Megatron's legacy checkpoints",
    remove_when="the converted weights are read from HuggingFace files instead",
)
def load_mcore_dist_weights(
    upstream: Callable[..., None], parallel_model: list[nn.Module], dist_weight_path: str, is_value_model: bool = False
) -> None:
    from pathlib import Path

    from post_training.checkpoint.shard_loading import is_shard_folder, load_shard

    if not is_shard_folder(Path(dist_weight_path)):
        return upstream(parallel_model, dist_weight_path, is_value_model)
    import torch.distributed as dist

    from post_training.hang_detection.progress import file_progress
    from post_training.layouts.model_tensors import train_tensors, unwrapped
    from post_training.layouts.placements import train_placement

    placement = train_placement(unwrapped(parallel_model[0]).config)
    load_shard(Path(dist_weight_path), placement, dist.get_rank(), train_tensors(parallel_model), file_progress)
