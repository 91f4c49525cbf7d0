"""Rejects models and options with which Megatron-core trains another model than the rollout serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from post_training.report.run_folder import at
from verl_plugin.libraries import LIBRARIES_KEY, libraries_of
from verl_plugin.mindspeed_layers import LAYERS, OTHER_LAYERS, trains_with_mindspeed
from verl_plugin.rotary import is_built, rotary_type
from verl_plugin.sentences import invalid

_MEGATRON = "actor_rollout_ref.actor.megatron"
_TRANSFORMER = f"{_MEGATRON}.override_transformer_config"
_SERVED = "actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides"
_OF_MINDSPEED = ("qwen3", "qwen3_moe", "deepseek_v3")
# Keys, and why they must not be set.
_OPTIONS = {
    f"{_MEGATRON}.override_ddp_config.overlap_param_gather": (
        "ranks gather updated weights at the next forward, after the rollout has been given the old ones"
    ),
    f"{_TRANSFORMER}.pipeline_model_parallel_layout": "verl computes each stage's first layer without it",
    f"{_TRANSFORMER}.account_for_embedding_in_pipeline_split": "verl computes each stage's first layer without it",
    f"{_TRANSFORMER}.account_for_loss_in_pipeline_split": "verl computes each stage's first layer without it",
}


def option_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each option of Megatron-core with which weights would be old or those of other layers."""
    for key, reason in _OPTIONS.items():
        if at(config, key):
            yield invalid(key, at(config, key), reason, "null")


def megatron_model_problems(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the layers that a bridge builds for `model`, the values of its config.json, compute something else."""
    name, rotary = str(model.get("model_type")), rotary_type(model)
    if not is_built(name, rotary):
        yield (
            f"config.json's rope_type={rotary} is invalid: vLLM scales positions of {name}, and mbridge 0.15.1 builds "
            "Megatron-core's layers without that. Train with fsdp2, or remove rope_scaling from config.json for "
            "sequences that need none."
        )
    overridden = at(config, _SERVED)
    if isinstance(overridden, Mapping) and any(key.startswith("rope_") for key in overridden):
        yield invalid(_SERVED, dict(overridden), "only the rollout reads it, and training rotates otherwise", "null")
    # transformers' defaults differ: DeepSeek-V3 normalises.
    normalises = model.get("norm_topk_prob", name == "deepseek_v3")
    if (model.get("num_experts") or model.get("n_routed_experts")) and not normalises:
        yield (
            f"config.json's norm_topk_prob={normalises} is invalid: Megatron-core normalises the "
            "weights of a token's experts, and vLLM does not. Train with fsdp2."
        )
    if trains_with_mindspeed(config) and name not in _OF_MINDSPEED:
        reason = f"{LAYERS} has no bridge for {name}"
        yield invalid(LIBRARIES_KEY, libraries_of(config), reason, f"a list with {OTHER_LAYERS} in its place")
