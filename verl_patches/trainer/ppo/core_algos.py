"""Patches of verl's losses: a policy loss over whole responses (GSPO), and a value loss over answer tokens only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.critic.feature import CRITIC
from verl_patches.features.sequence_ratio.feature import SEQUENCE_RATIO

if TYPE_CHECKING:
    import torch


@wrap(
    "verl.trainer.ppo.core_algos:compute_policy_loss",
    feature=SEQUENCE_RATIO,
    why="verl compares policies token by token; with experts, whose choice differs between rollout and training, the "
    "ratio of a whole response is steadier",
    upstream="https://github.com/verl-project/verl/pull/2775",
    remove_when="the pinned verl has actor.policy_loss.loss_mode=gspo",
)
def compute_policy_loss(
    upstream: Callable[..., tuple[torch.Tensor, ...]],
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    from verl_patches.features.sequence_ratio.log_probs import old_log_probs_of_sequences

    old_log_prob = old_log_probs_of_sequences(log_prob, old_log_prob, response_mask)
    return upstream(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs)


@wrap(
    "verl.trainer.ppo.core_algos:compute_value_loss",
    feature=CRITIC,
    why="at the cluster's commit the FSDP critic's mask is one token early: its loss has one extra token, of a state "
    "after the last choice",
    upstream="https://github.com/verl-project/verl/pull/1850",
    remove_when="the pinned verl's FSDP critic masks its loss by the tokens of responses",
)
def compute_value_loss(
    upstream: Callable[..., tuple[torch.Tensor, ...]], *args: Any, response_mask: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    from verl_patches.features.critic.tokens import last_forward

    return upstream(*args, response_mask=last_forward().mask(response_mask), **kwargs)
