"""Metrics of a training batch on the driver: groups with a gradient, and truncated answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from post_training.rewards import counts
from verl_patches.features.measure import serialized


def truncated(responses: torch.Tensor, mask: torch.Tensor, end_tokens: Iterable[int]) -> torch.Tensor:
    """Return which answers were cut at the greatest length: no padding, and no end token at the last position.

    For two answers of length 3, `5 6 9` and `5 6 7`, and the end token 9, the second was cut.

    Args:
        responses: [batch, response length] token ids.
        mask: [batch, response length], 1 up to and including the end token.
        end_tokens: the tokens that end an answer.

    Returns:
        [batch], bool.
    """
    ended = torch.isin(responses[:, -1], torch.tensor(sorted(end_tokens), dtype=responses.dtype))
    return mask.bool().all(-1) & ~ended


def batch_metrics(batch: Any, end_tokens: Iterable[int]) -> dict[str, float]:
    """Return the metrics of a batch as verl's loop passes it to the update, a `DataProto`.

    A group, the answers to one prompt, has a gradient only if its rewards differ: equal ones all have advantage 0.
    """
    rewards = batch.batch["token_level_scores"].sum(-1).tolist()
    groups = defaultdict(set)
    for uid, reward in zip(batch.non_tensor_batch["uid"], rewards, strict=True):
        groups[uid].add(reward)
    responses = batch.batch["responses"]
    mask = batch.batch["attention_mask"][:, -responses.size(1) :]
    return {
        "sampling/trained_prompts": len(groups),
        "sampling/generated_prompts": len(groups),
        "sampling/groups_with_gradient": sum(len(each) > 1 for each in groups.values()) / len(groups),
        "sampling/truncated_share": truncated(responses, mask, end_tokens).float().mean().item(),
    }


def with_batch_metrics(
    update_actor: Callable[[Any], Any],
    end_tokens: Iterable[int],
    more: Callable[[], Mapping[str, float]],
) -> Callable[[Any], Any]:
    """Wrap verl's call of the workers' update to report further metrics.

    Args:
        update_actor: verl's call.
        end_tokens: the tokens that end an answer.
        more: returns metrics that replace those of the same name.

    Returns:
        The update, whose metrics also have `batch_metrics`, the bytes that the driver has serialized per sample and the
        answers without a result since the end of the last update, and those of `more`.
    """

    def update(batch: Any) -> Any:
        output = update_actor(batch)
        handed = serialized.take() / len(batch)
        metrics = {
            **batch_metrics(batch, end_tokens),
            "perf/driver_bytes_per_sample": handed,
            **counts.take(),
            **more(),
        }
        output.meta_info["metrics"].update(metrics)
        return output

    return update
