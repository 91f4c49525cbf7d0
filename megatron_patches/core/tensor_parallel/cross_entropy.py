"""Megatron's vocabulary-parallel cross entropy takes logits that have not been computed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.chunked_log_probs.feature import CHUNKED_LOG_PROBS

if TYPE_CHECKING:
    import torch


@wrap(
    "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
    feature=CHUNKED_LOG_PROBS,
    evidence="executed",
    why="Megatron needs whole logits in float32, beside those in the model's type; cross_entropy_loss_fusion compiles "
    "the same steps and needs them too",
    upstream="not forwarded: part of this project's features",
    remove_when="the pinned Megatron computes log-probs and entropy from hidden states in chunks",
)
def vocab_parallel_cross_entropy(
    upstream: Callable[..., torch.Tensor], vocab_parallel_logits: Any, target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    from verl_patches.features.chunked_log_probs.deferred import DeferredLogits

    if isinstance(vocab_parallel_logits, DeferredLogits):
        return -vocab_parallel_logits.log_probs(target)
    return upstream(vocab_parallel_logits, target, *args, **kwargs)
