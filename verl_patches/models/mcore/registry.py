"""Patches of verl's model registry, which build families of models from this project's modules.

verl 0.4.0 has entries of its own for them, which need megatron-core 0.12 and transformer_engine, so its registry
functions are wrapped: they handle these families and leave every other model to upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import OWN_MODELS
from verl_patches.features.critic.feature import CRITIC
from verl_patches.features.mindspeed.feature import MINDSPEED
from verl_patches.features.router_balance.feature import ROUTER_BALANCE

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig
    from torch import nn
    from transformers import PretrainedConfig

    from post_training.models.families import MegatronModel, MindspeedModel

_UPSTREAM = "not forwarded: verl supports megatron-core 0.12 and later"
_OURS = "not forwarded: part of this project's features"
_WITH_THE_ENGINE = "verl trains through MindSpeed-LLM by itself"
_REMOVE_WHEN = "the pinned megatron-core has the attention and the routers of these families"


def _own_model(hf_config: Any) -> MegatronModel | None:
    """Return this project's modules for a model; None if verl's are used."""
    from post_training.models.families import find_family

    family = find_family(hf_config)
    return None if family is None else family.megatron


def _mindspeed_model(hf_config: Any) -> MindspeedModel | None:
    """Return MindSpeed-LLM's modules for a model; None if it has none."""
    from post_training.models.families import find_family

    family = find_family(hf_config)
    return None if family is None else family.mindspeed


@wrap(
    "verl.models.mcore.registry:hf_to_mcore_config",
    feature=OWN_MODELS,
    why="verl's converter fills fields that megatron-core 0.8.0 does not have; ours is typed and checked",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def hf_to_mcore_config(
    upstream: Callable[..., TransformerConfig],
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    **override_transformer_config_kwargs: Any,
) -> TransformerConfig:
    make = upstream if (own := _own_model(hf_config)) is None else own.config
    return make(hf_config, dtype, **override_transformer_config_kwargs)


@wrap(
    "verl.models.mcore.registry:hf_to_mcore_config",
    feature=MINDSPEED,
    why="MindSpeed-LLM's code reads its arguments from the configuration of the model",
    upstream=_OURS,
    remove_when=_WITH_THE_ENGINE,
)
def hf_to_mindspeed_config(
    upstream: Callable[..., TransformerConfig],
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    **override_transformer_config_kwargs: Any,
) -> TransformerConfig:
    config = upstream(hf_config, dtype, **override_transformer_config_kwargs)
    mindspeed = _mindspeed_model(hf_config)
    return config if mindspeed is None else mindspeed.config(config)


@wrap(
    "verl.models.mcore.registry:hf_to_mcore_config",
    feature=ROUTER_BALANCE,
    why="this project's router reads from the model's configuration whether experts are assigned in turn",
    upstream=_OURS,
    remove_when="the pinned megatron-core has moe_router_force_load_balancing for these routers",
)
def hf_to_balanced_config(
    upstream: Callable[..., TransformerConfig],
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    **override_transformer_config_kwargs: Any,
) -> TransformerConfig:
    from post_training.models.families import find_family

    family = find_family(hf_config)
    if family is None or not family.balances_router:
        return upstream(hf_config, dtype, **override_transformer_config_kwargs)
    return upstream(hf_config, dtype, **override_transformer_config_kwargs, moe_router_force_load_balancing=True)


@wrap(
    "verl.models.mcore.registry:init_mcore_model",
    feature=OWN_MODELS,
    why="megatron-core 0.8.0 has no layer specs for these families",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def init_mcore_model(
    upstream: Callable[..., nn.Module],
    tfconfig: TransformerConfig,
    hf_config: PretrainedConfig,
    pre_process: bool = True,
    post_process: bool | None = None,
    **kwargs: Any,
) -> nn.Module:
    own = _own_model(hf_config)
    if own is None:
        return upstream(tfconfig, hf_config, pre_process, post_process, **kwargs)
    # verl at the cluster's commit calls it fix_moe_router here.
    frozen = kwargs.get("freeze_moe_router") or kwargs.get("fix_moe_router") or False
    return own.build(tfconfig, hf_config, pre_process, post_process, freeze_moe_router=frozen)


@wrap(
    "verl.models.mcore.registry:init_mcore_model",
    feature=MINDSPEED,
    why="MindSpeed-LLM has its own layer specs, with the kernels of the cluster",
    upstream=_OURS,
    remove_when=_WITH_THE_ENGINE,
)
def init_mindspeed_model(
    upstream: Callable[..., nn.Module],
    tfconfig: TransformerConfig,
    hf_config: PretrainedConfig,
    pre_process: bool = True,
    post_process: bool | None = None,
    **kwargs: Any,
) -> nn.Module:
    mindspeed = _mindspeed_model(hf_config)
    if mindspeed is None:
        return upstream(tfconfig, hf_config, pre_process, post_process, **kwargs)
    return mindspeed.build(tfconfig, hf_config, pre_process, post_process)


@wrap(
    "verl.models.mcore.registry:init_mcore_model",
    feature=CRITIC,
    why="verl's value head is in a package that imports flash_attn, which NPUs do not have; and under sequence "
    "parallelism the gradients of its bias are not summed over the ranks",
    upstream="not forwarded: specific to NPUs, which have no flash_attn",
    remove_when="the pinned verl builds value models without flash_attn",
    evidence="executed",
    outside=["own_models", "mindspeed"],
)
def init_value_model(
    upstream: Callable[..., nn.Module],
    tfconfig: TransformerConfig,
    hf_config: PretrainedConfig,
    pre_process: bool = True,
    post_process: bool | None = None,
    *,
    value: bool = False,
    **kwargs: Any,
) -> nn.Module:
    model = upstream(tfconfig, hf_config, pre_process, post_process, **kwargs)
    if value and post_process:
        from post_training.models.megatron.value_head import ValueHead

        model.output_layer = ValueHead(tfconfig)
    return model


@wrap(
    "verl.models.mcore.registry:get_mcore_weight_converter",
    feature=OWN_MODELS,
    why="verl's converter knows transformer_engine's parameter names; weights move by the reshard layouts instead",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def get_mcore_weight_converter(
    upstream: Callable[..., Callable[..., Any] | None], hf_config: PretrainedConfig, dtype: torch.dtype
) -> Callable[..., Any] | None:
    return upstream(hf_config, dtype) if _own_model(hf_config) is None else None
