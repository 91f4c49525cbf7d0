"""Leaving answers that were cut out of an update: none of their tokens counts, in any sum or number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from verl_patches.features.measure.batch_metrics import truncated

# Columns that are 0 where a token does not count, as they are behind the end of an answer.
_LOG_PROBS = ("old_log_probs", "ref_log_prob")


def without_truncated(batch: Any, end_tokens: Iterable[int]) -> Any:
    """`batch`, a `DataProto` as verl's loop gives it to the update, in which a cut answer has no tokens.

    verl's loss takes its mask from the attention mask, so the tokens are in the update's forward neither: an answer's
    tokens have no influence on those of others. The batch itself stays as it is.
    """
    from verl import DataProto

    responses = batch.batch["responses"]
    width = responses.size(1)
    kept = ~truncated(responses, batch.batch["attention_mask"][:, -width:], end_tokens)
    tensors = batch.batch.clone(recurse=False)
    attention = tensors["attention_mask"].clone()
    attention[:, -width:] *= kept[:, None].to(attention.dtype)
    tensors["attention_mask"] = attention
    if "response_mask" in tensors.keys():
        tensors["response_mask"] = attention[:, -width:].to(tensors["response_mask"].dtype)
    for name in _LOG_PROBS:
        if name in tensors.keys():
            tensors[name] = tensors[name].masked_fill(~kept[:, None], 0.0)
    return DataProto(batch=tensors, non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info)


def filtering(update_actor: Callable[[Any], Any], end_tokens: Iterable[int]) -> Callable[[Any], Any]:
    """verl's call of the workers' update, without answers that were cut."""
    return lambda batch: update_actor(without_truncated(batch, end_tokens))
