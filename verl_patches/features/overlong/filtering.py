"""Leaves truncated answers out of an update: none of their tokens counts, in any sum or number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from verl_patches.features.measure.batch_metrics import truncated

# Columns to set to 0 for tokens that do not count, as they are after the end of an answer.
_LOG_PROBS = ("old_log_probs", "ref_log_prob")


def without_truncated(batch: Any, end_tokens: Iterable[int]) -> Any:
    """Return a copy of `batch`, a `DataProto` as verl's loop passes it to the update, with truncated answers masked.

    verl's loss takes its mask from the attention mask, so the update's forward does not see these tokens either; they
    have no influence on other answers. The batch itself is not changed.
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
    """Wrap verl's call of the workers' update to leave truncated answers out."""
    return lambda batch: update_actor(without_truncated(batch, end_tokens))
