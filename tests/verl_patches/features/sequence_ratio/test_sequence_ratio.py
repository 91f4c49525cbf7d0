"""GSPO by verl's own policy loss equals the paper's objective in plain torch, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import compute_policy_loss

from verl_patches.features.sequence_ratio.log_probs import old_log_probs_of_sequences
from verl_patches.trainer.configuration_checks import ConfigurationError, check_configuration
from verl_patches.trainer.main_ppo import compose

SWITCH = "actor_rollout_ref.overlay.sequence_ratio.enabled=true"
RECOMPUTED = "actor_rollout_ref.actor.recompute_old_log_prob=true"
MEAN = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
LOW, HIGH = 0.05, 0.07


def gspo(log_probs: list[torch.Tensor], old: list[torch.Tensor], advantages: list[float]) -> torch.Tensor:
    """Return the paper's objective, response by response: minus the mean of min(s A, clip(s) A)."""
    terms = []
    for current, before, advantage in zip(log_probs, old, advantages, strict=True):
        ratio = ((current - before).sum() / len(current)).exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage))
    return -torch.stack(terms).mean()


def by_verl(log_probs, old, advantages, mask, sequences=True):
    if sequences:
        old = old_log_probs_of_sequences(log_probs, old, mask)
    # The dual clip, which the paper does not have, is set so high that it never applies.
    return compute_policy_loss(
        old, log_probs, advantages[:, None].expand_as(mask), mask, cliprange=0.2, cliprange_low=LOW,
        cliprange_high=HIGH, clip_ratio_c=1e6, loss_agg_mode="seq-mean-token-mean",
    )  # fmt: skip


def drawn(lengths: list[int], seed: int, apart: float):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    log_probs = (torch.randn(shape, generator=generator, dtype=torch.float64) - 3).requires_grad_()
    old = log_probs.detach() + apart * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).double()
    return log_probs, old, torch.randn(len(lengths), generator=generator, dtype=torch.float64), mask


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.0, 0.02, 0.3]))
def test_value_and_gradient_are_those_of_the_paper(lengths, seed, apart):
    log_probs, old, advantages, mask = drawn(lengths, seed, apart)
    cut = [(row[:length], before[:length]) for row, before, length in zip(log_probs, old, lengths, strict=True)]
    expected = gspo(*zip(*cut, strict=True), advantages.tolist())
    found, *_ = by_verl(log_probs, old, advantages, mask)
    assert found.item() == pytest.approx(expected.item(), abs=1e-7)
    (wanted,), (gradient,) = (torch.autograd.grad(loss, log_probs) for loss in (expected, found))
    torch.testing.assert_close(gradient, wanted, atol=1e-7, rtol=1e-7)


def test_ratios_of_tokens_give_another_loss():
    """The control. A single outlier token is clipped by itself, but not by the ratio of its response."""
    log_probs, old, advantages, mask = drawn([8, 3, 5], seed=3, apart=0.3)
    assert by_verl(log_probs, old, advantages, mask)[0] != by_verl(log_probs, old, advantages, mask, False)[0]
    old = log_probs.detach().clone()
    old[0, 0] -= 0.3  # a ratio of 1.35, or 1.04 over 8 tokens
    ones = torch.ones(3, dtype=torch.float64)
    assert by_verl(log_probs, old, ones, mask)[1] == 0 < by_verl(log_probs, old, ones, mask, False)[1]


def test_a_response_without_tokens_has_the_ratio_1():
    log_probs, old, _, mask = drawn([4, 2], seed=1, apart=0.3)
    mask[1] = 0
    ratios = (log_probs - old_log_probs_of_sequences(log_probs, old, mask)).exp()
    assert torch.equal(ratios[1], torch.ones_like(ratios[1])) and ratios.isfinite().all()


def test_what_it_needs_is_asked_for():
    check_configuration(compose("rehearsal", [SWITCH, RECOMPUTED, MEAN]))
    with pytest.raises(ConfigurationError, match="recompute_old_log_prob=False takes the update's own"):
        check_configuration(compose("rehearsal", [SWITCH, MEAN]))
    with pytest.raises(ConfigurationError, match="loss_agg_mode=token-mean is another. Set it to seq-mean-token-mean"):
        check_configuration(compose("rehearsal", [SWITCH, RECOMPUTED]))
