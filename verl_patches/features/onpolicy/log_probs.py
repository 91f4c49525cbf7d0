"""Extracts log-probs of responses from those of whole sequences."""

from __future__ import annotations

import torch


def response_log_probs(log_probs: torch.Tensor, response_length: int) -> torch.Tensor:
    """Return the columns of `log_probs` [batch, sequence] that predict response tokens: [batch, response_length]."""
    return log_probs[:, -response_length - 1 : -1]
