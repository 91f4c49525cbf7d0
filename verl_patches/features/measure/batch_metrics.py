"""What the driver sees of the batch that a step trains on: which groups teach anything, and which answers were cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from post_training.rewards import counts
from verl_patches.features.measure import serialized


def truncated(responses: torch.Tensor, mask: torch.Tensor, end_tokens: Iterable[int]) -> torch.Tensor:
    """Which answers were cut at the greatest length: no padding, and no end token at the last place.

    responses, mask: [batch, response length], integers; the mask is 1 up to and with the end token. Returns [batch],
    bool. Of two answers of length 3, `5 6 9` and `5 6 7` with the end token 9, the second was cut.
    """
    ended = torch.isin(responses[:, -1], torch.tensor(sorted(end_tokens), dtype=responses.dtype))
    return mask.bool().all(-1) & ~ended


def batch_metrics(batch: Any, end_tokens: Iterable[int]) -> dict[str, float]:
    """Metrics of a batch as verl's loop gives it to the update, a `DataProto`.

    A group, the answers to one prompt, carries a gradient where its rewards differ: equal ones all have advantage 0.
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
    """verl's call of the workers' update, whose metrics also hold `batch_metrics`, what the driver has serialized for
    each sample and which answers got no result since the last update's end, and what `more` knows better."""

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
