"""verl builds DeepSeek-V3 from this project's modules.

verl 0.4.0 already has entries for DeepSeek-V3, which need megatron-core 0.12 and transformer_engine, so its registry
functions are wrapped: they answer for DeepSeek-V3 and leave every other model to upstream.
"""

from typing import Any

from overlay import wrap
from verl_patches.features.compatibility.feature import DEEPSEEK_V3
from verl_patches.features.mindspeed.feature import MINDSPEED
from verl_patches.features.router_balance.feature import ROUTER_BALANCE

_DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
_UPSTREAM = "not forwarded: verl supports megatron-core 0.12 and later"
_OURS = "not forwarded: part of this project's features"
_WITH_THE_ENGINE = "verl trains through MindSpeed-LLM by itself"
_REMOVE_WHEN = "the pinned megatron-core has multi-head latent attention and DeepSeek's router"


def _is_deepseek_v3(hf_config: Any) -> bool:
    return list(hf_config.architectures) == [_DEEPSEEK_V3]


def _is_trained_by_mindspeed(hf_config: Any) -> bool:
    from verl_patches.features import settings

    return _is_deepseek_v3(hf_config) and MINDSPEED.is_on(settings.current())


@wrap(
    "verl.models.mcore.registry:hf_to_mcore_config",
    feature=DEEPSEEK_V3,
    why="verl's converter fills fields that megatron-core 0.8.0 does not have; ours is typed and checked",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def hf_to_mcore_config(upstream, hf_config, dtype, **override_transformer_config_kwargs):
    if not _is_deepseek_v3(hf_config):
        return upstream(hf_config, dtype, **override_transformer_config_kwargs)
    from post_training.models.megatron.deepseek_v3_config import deepseek_v3_config_from_huggingface

    return deepseek_v3_config_from_huggingface(hf_config, dtype, **override_transformer_config_kwargs)


@wrap(
    "verl.models.mcore.registry:hf_to_mcore_config",
    feature=MINDSPEED,
    why="MindSpeed-LLM's code reads its arguments from the configuration of the model",
    upstream=_OURS,
    remove_when=_WITH_THE_ENGINE,
)
def hf_to_mindspeed_config(upstream, hf_config, dtype, **override_transformer_config_kwargs):
    config = upstream(hf_config, dtype, **override_transformer_config_kwargs)
    if not _is_trained_by_mindspeed(hf_config):
        return config
    from post_training.models.mindspeed.packed_gpt_model import with_arguments

    return with_arguments(config)


@wrap(
    "verl.models.mcore.registry:hf_to_mcore_config",
    feature=ROUTER_BALANCE,
    why="this project's router reads from the configuration of the model whether experts are dealt out in turn",
    upstream=_OURS,
    remove_when="the pinned megatron-core has moe_router_force_load_balancing for DeepSeek-V3's router",
)
def hf_to_balanced_config(upstream, hf_config, dtype, **override_transformer_config_kwargs):
    from verl_patches.features import settings

    if not (settings.current().router_balance.forced and _is_deepseek_v3(hf_config)):
        return upstream(hf_config, dtype, **override_transformer_config_kwargs)
    return upstream(hf_config, dtype, **override_transformer_config_kwargs, moe_router_force_load_balancing=True)


@wrap(
    "verl.models.mcore.registry:init_mcore_model",
    feature=DEEPSEEK_V3,
    why="megatron-core 0.8.0 has no layer spec for DeepSeek-V3",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def init_mcore_model(upstream, tfconfig, hf_config, pre_process=True, post_process=None, **kwargs):
    if not _is_deepseek_v3(hf_config):
        return upstream(tfconfig, hf_config, pre_process, post_process, **kwargs)
    from post_training.models.megatron.deepseek_v3_model import build_deepseek_v3

    if kwargs.get("value"):
        raise ValueError("DeepSeek-V3 as a value model is not supported: GRPO needs no critic")
    # verl at the cluster's commit calls it fix_moe_router here.
    frozen = kwargs.get("freeze_moe_router") or kwargs.get("fix_moe_router") or False
    return build_deepseek_v3(tfconfig, hf_config, pre_process, post_process, freeze_moe_router=frozen)


@wrap(
    "verl.models.mcore.registry:init_mcore_model",
    feature=MINDSPEED,
    why="MindSpeed-LLM has a layer spec of its own for DeepSeek-V3, with the kernels of the cluster",
    upstream=_OURS,
    remove_when=_WITH_THE_ENGINE,
)
def init_mindspeed_model(upstream, tfconfig, hf_config, pre_process=True, post_process=None, **kwargs):
    if not _is_trained_by_mindspeed(hf_config) or kwargs.get("value"):
        return upstream(tfconfig, hf_config, pre_process, post_process, **kwargs)
    from post_training.models.mindspeed.packed_gpt_model import build_deepseek_v3

    return build_deepseek_v3(tfconfig, hf_config, pre_process, post_process)


@wrap(
    "verl.models.mcore.registry:get_mcore_weight_converter",
    feature=DEEPSEEK_V3,
    why="verl's converter knows transformer_engine's parameter names; weights move by the reshard layouts instead",
    upstream=_UPSTREAM,
    remove_when=_REMOVE_WHEN,
    evidence="executed",
)
def get_mcore_weight_converter(upstream, hf_config, dtype):
    return None if _is_deepseek_v3(hf_config) else upstream(hf_config, dtype)
