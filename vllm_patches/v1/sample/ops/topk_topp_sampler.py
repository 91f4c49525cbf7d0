"""Keep the distribution of a draw until its log-prob has been reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.temperature.feature import TEMPERATURE

if TYPE_CHECKING:
    import torch


@wrap(
    "vllm.v1.sample.ops.topk_topp_sampler:random_sample",
    feature=TEMPERATURE,
    evidence="executed",
    why="the probabilities from which tokens are drawn exist only here, and the draw overwrites them",
    upstream="https://github.com/vllm-project/vllm/pull/21398",
    remove_when="the pinned vLLM has logprobs_mode and verl sets processed_logprobs",
)
def random_sample(
    upstream: Callable[..., torch.Tensor], probs: torch.Tensor, generators: dict[int, torch.Generator]
) -> torch.Tensor:
    from verl_patches.features.temperature.sampled import remember

    remember(probs)
    return upstream(probs, generators)
