"""Loss weights: the weight of a micro batch's loss in the loss of its whole mini batch.

Every term of verl's loss (policy, KL, entropy) is aggregated over micro batch i alone, to m_i, as `loss_agg_mode` says,
and the back-end then averages: m = sum_i u_i m_i over the micro batches of all data-parallel ranks, with u_i = 1 /
(micro batches x ranks) on Megatron. One pass over the whole mini batch would give sum_i s_i m_i, with

    s_i = w_i / W      w_i                        W
    token-mean         tokens of i                tokens of the mini batch
    seq-mean-*         sequences of i             sequences of the mini batch
    *-sum-norm         1                          1

because m_i is a sum over tokens or sequences divided by their number, or a sum divided by the same width everywhere. So
one factor s_i / u_i on the loss of a micro batch is enough, for all its terms together. Only response tokens under the
mask count; a sequence without any is in no denominator.

Two ranks with one micro batch each, of 6 and 2 tokens: upstream has (m_1 + m_2) / 2. The factors are 6/8 x 2 = 1.5 and
2/8 x 2 = 0.5, and (1.5 m_1 + 0.5 m_2) / 2 = (6 m_1 + 2 m_2) / 8, which is the mean over all 8 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOKEN_MEAN = "token-mean"
# Means over sequences; each sequence contributes a sum or a mean over its tokens.
SEQUENCE_MEANS = ("seq-mean-token-sum", "seq-mean-token-mean")
# A sum over sequences; the name is verl's.
SUM = "seq-mean-token-sum-norm"
MODES = (TOKEN_MEAN, *SEQUENCE_MEANS, SUM)


@dataclass(frozen=True)
class Amounts:
    """Amounts of a batch: rows, tokens that count, and sequences with any token that counts."""

    rows: int
    tokens: int
    sequences: int


def count(mask: torch.Tensor) -> torch.Tensor:
    """Return the fields of `Amounts`, int64 [3] on the mask's device, for a response mask [rows, response length]."""
    lengths = mask.to(torch.int64).sum(dim=-1)
    return torch.stack([torch.full_like(lengths.sum(), len(mask)), lengths.sum(), (lengths > 0).sum()])


def share(mode: str, part: Amounts, whole: Amounts) -> float:
    """Return s_i, the weight of `part`'s aggregated loss in that of `whole`; 0 if no token of `whole` counts.

    Raises:
        ValueError: `mode` is not one of verl's.
    """
    if mode not in MODES:
        raise ValueError(
            f"actor_rollout_ref.actor.loss_agg_mode={mode} is invalid. Set it to one of {', '.join(MODES)}"
        )
    if mode == SUM:
        return 1.0
    weight, total = (part.tokens, whole.tokens) if mode == TOKEN_MEAN else (part.rows, whole.sequences)
    return weight / total if total else 0.0
