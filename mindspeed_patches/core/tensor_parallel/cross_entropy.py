"""MindSpeed's part of the cross entropy works in place on the logits, as Megatron's does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.chunked_log_probs.feature import CHUNKED_LOG_PROBS

if TYPE_CHECKING:
    import torch


@wrap(
    "mindspeed.core.tensor_parallel.cross_entropy:calculate_predicted_logits",
    feature=CHUNKED_LOG_PROBS,
    relies_on=["megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy.forward"],
    why="it subtracts the maximum into a second tensor as large as all logits in float32, whereas Megatron's "
    "function, which it replaces, writes into the first; whole logits exist where an output layer has a bias or a "
    "hook reads them",
    upstream="docs/upstream/mindspeed-cross-entropy-copy.md",
    remove_when="MindSpeed's function subtracts in place",
)
def calculate_predicted_logits(
    upstream: Callable[..., tuple[torch.Tensor, ...]],
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    logits_max: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
) -> tuple[torch.Tensor, ...]:
    import torch

    if vocab_parallel_logits.dtype != torch.float32:  # in another type each step would round
        return upstream(vocab_parallel_logits, target, logits_max, vocab_start_index, vocab_end_index)
    elsewhere = (target < vocab_start_index) | (target >= vocab_end_index)
    columns = (target - vocab_start_index) * ~elsewhere
    distances = vocab_parallel_logits.sub_(logits_max.unsqueeze(-1))
    predicted = distances.gather(-1, columns.unsqueeze(-1)).squeeze(-1) * ~elsewhere
    exponentials = distances.exp_()
    return elsewhere, columns.flatten(), predicted, exponentials.sum(-1), exponentials
