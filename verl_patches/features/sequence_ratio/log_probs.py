"""The sequence-level importance ratio of GSPO (Zheng et al., 2025, arXiv:2507.18071, section 4) in a token-level loss.

The ratio of response i with |y_i| tokens is s_i = exp(mean_t (log p_t - log p_old,t)). With the token-level form of the
paper, s_i,t = sg[s_i] p_t / sg[p_t], a loss that takes exp(log p_t - old_t) for its ratio has GSPO's value and gradient
if it is given old_t = sg[log p_t] - sg[log s_i]: the difference is log s_i, and its gradient that of log p_t.
"""

from __future__ import annotations

import torch


def old_log_probs_of_sequences(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return old log-probs that make every token's ratio that of its response; they have no gradient.

    Args:
        log_probs, old_log_probs: [responses, response length].
        mask: of the same shape, not 0 if a token counts; a response without any has the ratio 1.
    """
    current = log_probs.detach()
    counted = mask.to(current.dtype)
    total = ((current - old_log_probs) * counted).sum(dim=-1, keepdim=True)
    return current - total / counted.sum(dim=-1, keepdim=True).clamp(min=1)
