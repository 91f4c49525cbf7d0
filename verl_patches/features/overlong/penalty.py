"""DAPO's soft punishment of overlong answers (https://arxiv.org/abs/2503.14476, equation 13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_patches.features.overlong.feature import OverlongBuffer

OVERLONG_REWARD = "overlong_reward"


def penalties(lengths: torch.Tensor, buffer: OverlongBuffer) -> torch.Tensor:
    """Return the penalties of answers of these lengths: [answers], between -factor and 0.

    Linear over the last `length` tokens: with at most 20 tokens, a buffer of 4 and the factor 1, it is 0 up to 16
    tokens, -0.25 for 17, and -1 for 20.
    """
    beyond = lengths.float() - (buffer.longest - buffer.length)
    return -buffer.factor * (beyond / buffer.length).clamp(0, 1)


def with_penalty(reward_fn: Callable[..., Any], buffer: OverlongBuffer) -> Callable[..., Any]:
    """Wrap verl's `reward_fn` to add each answer's penalty to the reward of its last token."""

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
