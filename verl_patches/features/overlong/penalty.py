"""DAPO's soft punishment of overlong answers (https://arxiv.org/abs/2503.14476, equation 13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_patches.features.overlong.feature import OverlongBuffer

OVERLONG_REWARD = "overlong_reward"


def penalties(lengths: torch.Tensor, buffer: OverlongBuffer) -> torch.Tensor:
    """What answers of these lengths cost: [answers], at most 0 and at least -factor.

    Linear over the last `length` tokens: of 20 tokens with the last 4 and the factor 1, 0 up to 16 tokens, -0.25 for
    17, -1 for 20.
    """
    beyond = lengths.float() - (buffer.longest - buffer.length)
    return -buffer.factor * (beyond / buffer.length).clamp(0, 1)


def with_penalty(reward_fn: Callable[..., Any], buffer: OverlongBuffer) -> Callable[..., Any]:
    """verl's `reward_fn`, whose answers lose their penalty at their last token."""

    def reward(data: Any, return_dict: bool = False) -> Any:
        result = reward_fn(data, return_dict=return_dict)
        rewards = result["reward_tensor"] if return_dict else result
        lengths = data.batch["attention_mask"][:, -rewards.size(1) :].sum(-1)
        costs = penalties(lengths, buffer)
        penalised = rewards.clone()
        penalised[torch.arange(len(rewards)), (lengths - 1).clamp(min=0)] += costs
        if not return_dict:
            return penalised
        further = dict(result.get("reward_extra_info", {}))
        if buffer.log:
            further[OVERLONG_REWARD] = costs.tolist()
        return {**result, "reward_tensor": penalised, "reward_extra_info": further}

    return reward
