"""Patches of Megatron's forward in verl: log-probs at the rollout's temperature and in chunks, and expert choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.chunked_log_probs.feature import CHUNKED_LOG_PROBS
from verl_patches.features.expert_sets.feature import EXPERT_SETS
from verl_patches.features.temperature.feature import TEMPERATURE

if TYPE_CHECKING:
    import torch
    from torch import nn


@wrap(
    "verl.models.mcore.model_forward:gptmodel_forward",
    feature=TEMPERATURE,
    evidence="executed",
    why="verl 0.4.0's Megatron log-probs ignore the rollout temperature, so training and rollout differ unless it is 1",
    upstream="https://github.com/verl-project/verl/pull/3133",
    remove_when="the pinned verl contains the fix",
)
def gptmodel_forward(
    upstream: Callable[..., Any], *args: Any, logits_processor: Callable[..., Any] | None = None, **kwargs: Any
) -> Any:
    from verl_patches.features.temperature.scaling import at_temperature

    if logits_processor is not None:
        logits_processor = at_temperature(logits_processor, settings.current().rollout_temperature)
    return upstream(*args, logits_processor=logits_processor, **kwargs)


@wrap(
    "verl.models.mcore.model_forward:gptmodel_forward",
    feature=CHUNKED_LOG_PROBS,
    evidence="executed",
    relies_on=[
        "verl.workers.actor.megatron_actor:MegatronPPOActor.forward_backward_batch",
        "megatron.core.models.gpt.gpt_model:GPTModel.forward",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
        "megatron.core.transformer.module:Float16Module.forward",
    ],
    why="the model applies its output layer before verl takes log-probs, so logits of all tokens exist, in two types; "
    "here both ends are available: the model, which can return hidden states, and the code that takes log-probs",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/2206",
    remove_when="the pinned verl fuses the output layer with the log-probs for Megatron",
    inside=["temperature"],
)
def gptmodel_forward_without_logits(
    upstream: Callable[..., Any],
    model: nn.Module,
    *args: Any,
    logits_processor: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    from verl_patches.features.chunked_log_probs.deferred import deferring

    if logits_processor is None:
        return upstream(model, *args, **kwargs)
    with deferring(model, logits_processor, CHUNKED_LOG_PROBS.current().chunk_bytes) as processor:
        return upstream(model, *args, logits_processor=processor, **kwargs)


@wrap(
    "verl.models.mcore.model_forward:gptmodel_forward",
    feature=EXPERT_SETS,
    evidence="executed",
    relies_on=["verl.models.mcore.util:preprocess_packed_seqs"],
    why="stages after the first see packed hidden states but no tokens; here every stage still has the micro batch",
    upstream="not forwarded: part of this project's features",
    remove_when="see MegatronPPOActor.forward_backward_batch",
)
def gptmodel_forward_recorded(
    upstream: Callable[..., Any],
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from verl_patches.features.expert_sets.training import micro_batch

    with micro_batch(input_ids, attention_mask):
        return upstream(model, input_ids, attention_mask, *args, **kwargs)
