"""What happens to each micro batch of an update between Megatron's schedule and verl's loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from verl_patches.features import settings
from verl_patches.features.measure.step_record import current_record
from verl_patches.features.onpolicy.log_probs import response_log_probs


def with_own_log_probs(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's forward-backward `schedule`, whose loss function sees the log-probs of this forward first.

    verl's forward step returns the loss as a `functools.partial` with the micro batch under the keyword `data`, and the
    last stage's output is a dict with `log_probs` [micro batch, sequence]. Forward-only passes go through untouched.
    """

    def run(*, forward_step_func: Callable[..., Any], forward_only: bool, **options: Any) -> Any:
        step = forward_step_func if forward_only else _observed(forward_step_func)
        return schedule(forward_step_func=step, forward_only=forward_only, **options)

    return run


def _observed(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(batches: Any, model: Any) -> Any:
        output, loss = forward_step(batches, model)
        return output, partial(_loss_of_own_log_probs, loss)

    return step


def _loss_of_own_log_probs(loss: partial, output: Any) -> Any:
    """Call `loss` after comparing the log-probs with the rollout's and, on-policy, using them as old_log_prob."""
    micro_batch = loss.keywords["data"]
    responses = micro_batch["responses"]
    log_probs = response_log_probs(output["log_probs"], responses.size(1))
    if "rollout_log_probs" in micro_batch.keys():
        mask = micro_batch["attention_mask"][:, -responses.size(1) :]
        current_record().difference.add(micro_batch["rollout_log_probs"], log_probs, mask)
    if not settings.current().recompute_old_log_prob:
        micro_batch["old_log_probs"] = log_probs.detach()
    return loss(output)
