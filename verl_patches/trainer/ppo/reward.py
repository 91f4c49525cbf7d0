"""Patches of verl's rewards: failures of the reward function are counted, although verl passes over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    import torch
    from verl import DataProto


@wrap(
    "verl.trainer.ppo.reward:compute_reward",
    why="verl prints the reward function's exception, scores the batch once more and continues as if nothing had "
    "happened",
    evidence="executed",
    feature=MEASURE,
    upstream="docs/upstream/verl-swallowed-reward-errors.md",
    remove_when="verl reports at the end of a run how often the reward function failed",
)
def compute_reward(
    upstream: Callable[..., tuple[torch.Tensor, dict[str, Any]]], data: DataProto, reward_fn: Callable[..., Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    from post_training.report.faults import REWARD_FAILED
    from post_training.rewards import failures
    from verl_patches.features.measure.samples import hold_samples

    try:
        result = upstream(data, failures.observed(reward_fn))
    except Exception as error:
        raise failures.RewardError(f"{REWARD_FAILED} twice ({failures.in_words(error)})") from error
    failures.require_nobody_missed()
    hold_samples(data, result, getattr(reward_fn, "tokenizer", None))
    return result


@wrap(
    "verl.trainer.ppo.reward:compute_reward",
    feature=WATCH,
    evidence="executed",
    why="a reward function that never returns stops the run, while all workers are idle",
    outside=["measure"],
)
def compute_reward_in_phase(
    upstream: Callable[..., tuple[torch.Tensor, dict[str, Any]]], data: DataProto, reward_fn: Callable[..., Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    from post_training.hang_detection.signs import process_signs

    with process_signs().phase("reward"):
        return upstream(data, reward_fn)
