"""Hooks on each micro batch of an update, between Megatron's schedule and verl's loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from verl_patches.features.measure.step_record import current_record
from verl_patches.features.onpolicy.log_probs import response_log_probs

Look = Callable[[Any, torch.Tensor], None]


def with_own_log_probs(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's forward-backward `schedule` to give the loss its own forward's log-probs as old_log_prob."""
    return before_loss(schedule, _take_own_log_probs)


def with_measured_difference(schedule: Callable[..., Any], recomputed: bool) -> Callable[..., Any]:
    """Wrap Megatron's forward-backward `schedule` to record the distance of training's log-probs to the rollout's.

    Args:
        schedule: Megatron's.
        recomputed: old_log_probs are those of the policy that sampled. The forward's own are only in the first update.
    """
    return before_loss(schedule, partial(_measure_difference, recomputed))


def before_loss(schedule: Callable[..., Any], look: Look) -> Callable[..., Any]:
    """Wrap `schedule` to call `look(micro_batch, log_probs of the response)` before each loss.

    verl's forward step returns the loss as a `functools.partial` with the micro batch under the keyword `data`, and the
    last stage's output is a dict with `log_probs` [micro batch, sequence]. Forward-only passes are left unchanged.
    """

    def run(*, forward_step_func: Callable[..., Any], forward_only: bool, **options: Any) -> Any:
        step = forward_step_func if forward_only else _observed(forward_step_func, look)
        return schedule(forward_step_func=step, forward_only=forward_only, **options)

    return run


def _observed(forward_step: Callable[..., Any], look: Look) -> Callable[..., Any]:
    def step(batches: Any, model: Any) -> Any:
        output, loss = forward_step(batches, model)
        # A partial again, so that several such hooks can be nested.
        return output, partial(_look_first, loss, look, data=loss.keywords["data"])

    return step


def _look_first(loss: partial, look: Look, output: Any, *, data: Any) -> Any:
    look(data, response_log_probs(output["log_probs"], data["responses"].size(1)))
    return loss(output)


def _take_own_log_probs(micro_batch: Any, log_probs: torch.Tensor) -> None:
    micro_batch["old_log_probs"] = log_probs.detach()


def _measure_difference(recomputed: bool, micro_batch: Any, log_probs: torch.Tensor) -> None:
    if "rollout_log_probs" in micro_batch.keys():
        mask = micro_batch["attention_mask"][:, -log_probs.size(1) :]
        of_training = micro_batch["old_log_probs"] if recomputed else log_probs
        current_record().difference.add(micro_batch["rollout_log_probs"], of_training, mask)
