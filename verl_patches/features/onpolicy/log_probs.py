"""Tensors that take the place of the old_log_prob that is not computed."""

from __future__ import annotations

import torch


def absent_log_probs(responses: torch.Tensor) -> torch.Tensor:
    """What stands where old_log_prob would be until the update fills it in: NaN, so that any use of it shows.

    Args:
        responses: [batch, response length], integer.

    Returns:
        [batch, response length], float32.
    """
    return torch.full(responses.shape, torch.nan, dtype=torch.float32, device=responses.device)


def response_log_probs(log_probs: torch.Tensor, response_length: int) -> torch.Tensor:
    """The columns of `log_probs` [batch, sequence] that predict the response's tokens: [batch, response_length]."""
    return log_probs[:, -response_length - 1 : -1]
