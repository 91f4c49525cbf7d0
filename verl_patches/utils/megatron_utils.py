"""Patches of verl's Megatron utilities: stages of any length, an optimizer in the run's precision, weights by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import OWN_MODELS
from verl_patches.features.precision.feature import PRECISION

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from torch import nn
    from transformers import PretrainedConfig


@wrap(
    "verl.utils.megatron_utils:get_transformer_layer_offset",
    feature=OWN_MODELS,
    why="verl knows only stages of equal length with a shorter first or last one; num_layer_list names every stage",
    upstream="not forwarded: num_layer_list is MindSpeed-LLM's option; verl took up the pipeline layout of "
    "megatron-core 0.13 instead, https://github.com/verl-project/verl/pull/2749",
    remove_when="verl reads the layer offset from the model itself",
    evidence="executed",
)
def get_transformer_layer_offset(
    upstream: Callable[..., int], pipeline_rank: int, vp_rank: int | None, config: TransformerConfig
) -> int:
    if hasattr(config, "first_layer_of_stage"):
        return config.first_layer_of_stage(pipeline_rank)
    return upstream(pipeline_rank, vp_rank, config)


@wrap(
    "verl.utils.megatron_utils:init_megatron_optim_config",
    feature=PRECISION,
    why="verl fixes bfloat16 parameters in the optimizer's configuration",
    upstream="https://github.com/verl-project/verl/pull/4086",
    remove_when="verl's Megatron worker reads its dtype from the configuration",
)
def init_megatron_optim_config(
    upstream: Callable[..., OptimizerConfig], optim_config: dict[str, Any]
) -> OptimizerConfig:
    from verl_patches.features.precision.dtypes import optimizer_in_float32

    return optimizer_in_float32(upstream(optim_config))


@wrap(
    "verl.utils.megatron_utils:per_tensor_generator",
    feature=OWN_MODELS,
    why="verl's generator supports neither experts over TP x EP nor DeepSeek-V3's fused weights on megatron-core 0.8.0",
    upstream="not forwarded: verl supports megatron-core 0.12 and later",
    remove_when="verl gathers DeepSeek-V3 from the pinned megatron-core",
)
def per_tensor_generator(
    upstream: Callable[..., Iterator[tuple[str, torch.Tensor]]],
    actor_module: list[nn.Module],
    model_config: PretrainedConfig,
    weight_converter: Any,
    transformer_config: TransformerConfig,
    *args: Any,
    **kwargs: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    from post_training.models.families import find_family, table_for

    family = find_family(model_config)
    if family is None or family.megatron is None:
        return upstream(actor_module, model_config, weight_converter, transformer_config, *args, **kwargs)
    import torch
    import torch.distributed as dist

    from post_training.layouts.model_tensors import train_tensors
    from post_training.layouts.placements import train_placement
    from post_training.reshard.per_tensor import full_tensors

    table, placement = table_for(model_config), train_placement(transformer_config)
    layouts = [table.megatron(placement, rank) for rank in range(dist.get_world_size())]
    device = torch.device("npu", torch.npu.current_device())
    return full_tensors(train_tensors(actor_module), layouts, table.shapes, dist.group.WORLD, device)
